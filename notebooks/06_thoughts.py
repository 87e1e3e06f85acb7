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
# # Can a model's thoughts be read, and does the answer depend on them?
#
# A Thinking States model (arXiv 2602.08332) thinks while it reads. After each chunk of a few tokens, its thinking block
# writes a short thought in words. Its compression block turns the thought into a state, which is added to the next
# chunk. This notebook follows the thoughts of one story, and then replaces one of them.

# %%
import cacheprobe as cp
from cacheprobe.tasks import parse_answer
from cacheprobe_analyses.thinking import thoughts_are_causal

# %% [markdown]
# ## A story and its thoughts
#
# The model is small, and was trained in this project on stories about a coin with at most ten people.

# %%
model = cp.load_model("coinflip-thinking")
example = cp.tasks.CoinFlip(people=6, distinct=False).example(4, seed=2)
print(model)
print(example.prompt)
print("true state, person by person:", " ".join(example.question.states), "| answer:", example.answer.strip())

# %%
settings = dict(max_new_tokens=3, window=4, deterministic=True, progress=False)
trace = cp.run(model, example, **settings)
thoughts = trace.thoughts()
print("answer:", parse_answer(trace.text(0)))
thoughts[["chunk", "start", "end", "said", "true_state", "agrees", "status"]]

# %% [markdown]
# Some thoughts are empty, because nothing that changes the state was read. The others name the coin's state after what
# was read, and all of them are right.
#
# In the picture the tokens stand at the bottom, in chunks. On each chunk stands the state S that is added to it; above
# it the thinking block, the thought, and the compression block that makes the next state.

# %%
cp.plots.thoughts_picture(thoughts, trace.rows(), trace.events(), trace.ledger(0), thinking=trace.meta["thinking"])

# %% [markdown]
# ## One thought is replaced
#
# In the middle of the prompt, the state of one thought is replaced by the state of the opposite thought. No token, no
# weight and no cache entry is changed.

# %%
words = [word.strip() for word in example.question.answers]
naming = thoughts[thoughts.said.isin(words)]
middle = naming.iloc[len(naming) // 2]
(opposite,) = set(words) - {middle.said}
imposed = model.state_of((*model.encode(opposite, add_special_tokens=False), model.config.eos_id))
own_state = trace.thought_states[int(middle.thought)]
print(f"after chunk {middle.chunk} the model thought {middle.said!r}; its state is replaced by that of {opposite!r}")

# %%
next_chunk = range(int(middle.end) + 1, int(middle.end) + 1 + model.chunk)
where = dict(request_id=0, site="pre", layer=model.config.l_in, positions=next_chunk, own_fingerprint=True)
changed = cp.run(model, example, interventions=cp.interventions.add(imposed - own_state, **where), **settings)
print("answer:", parse_answer(changed.text(0)))
beside = thoughts[["chunk", "said", "true_state"]].assign(changed=changed.thoughts().said)
beside

# %%
cp.plots.thoughts_picture(
    changed.thoughts(), changed.rows(), changed.events(), changed.ledger(0), thinking=changed.meta["thinking"]
)

# %% [markdown]
# ## Many stories, with controls
#
# The same replacement in 60 stories of 4 to 40 people. The controls: the thought's own state again, noise of the same
# norm, and zeros.

# %%
result = thoughts_are_causal.run(thoughts_are_causal.Config(texts=60))
print(result.table())

# %% [markdown]
# ## What was found
#
# - The thoughts of the story can be read as text, and all that name a state name the true one.
# - After the replacement the model thinks the opposite, follows the rest of the story from there, and gives the
#   opposite answer. Before it, both runs think the same.
# - In all 60 stories the other state gives the other answer, and the thought's own state never does. With noise or
#   zeros, the answer changes in some stories and not in others. So the answer depends on the thought.

# %%
later = beside[(beside.chunk > middle.chunk) & beside.said.isin(words)]
assert thoughts[thoughts.said != ""].agrees.all()
assert parse_answer(trace.text(0)) == example.answer.strip()
assert (beside[beside.chunk <= middle.chunk].said == beside[beside.chunk <= middle.chunk].changed).all()
assert later.said.nunique() == 2  # there are flips left to follow
assert all({before, now} == set(words) for before, now in zip(later.said, later.changed, strict=True))
assert {parse_answer(trace.text(0)), parse_answer(changed.text(0))} == set(words)
assert result.flipped["other state"] == 60 and result.flipped["own state again"] == 0
assert all(6 < result.flipped[control] < 54 for control in ("noise of its norm", "no state"))
