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
# # Why was a draft rejected, and what flips the verdict?
#
# In speculative decoding a drafter proposes tokens, and the whole model accepts or rejects them. Most tools throw the
# states of rejected tokens away. cacheprobe keeps them. This notebook takes one rejection apart, and then changes
# single states until the model accepts the draft.

# %%
import cacheprobe as cp

model = cp.load_model("smollm2-135m")
prompts = ["The sun rises in the east and sets in", "My brother called yesterday and said that he"]

# %% [markdown]
# ## A run with drafts
#
# The drafter is the model itself, stopped after layer 26: the logit lens reads a token there. Up to three such tokens
# are then verified by all 30 layers in one pass.

# %%
LAYER = 26
settings = dict(window=4, draft_length=3, max_new_tokens=16)
trace = cp.run(model, prompts, drafter=cp.drafters.EarlyExit(layer=LAYER), **settings)
print(trace)
for request_id, prompt in enumerate(prompts):
    print(f"{prompt}[{trace.text(request_id)}]")

# %%
beliefs, events = trace.hypotheses(), trace.events()
cp.plots.draft_verdicts(beliefs)

# %% [markdown]
# ## All rejections
#
# Each line is one rejected draft. `flip_layer` is the layer from which the committed token stays the first choice.
# `margin_nats` is by how much larger its log-probability is in the last layer than that of the drafted token, if that
# one is among the first five.

# %%
rejected = trace.rejected()
rejected[["request_id", "step", "text_before", "drafted_token", "committed_token", "flip_layer", "margin_nats"]]

# %% [markdown]
# ## One rejection
#
# The one with the largest margin. Its card shows every layer's most likely tokens at the position that judged the
# draft.

# %%
one = rejected.loc[rejected.margin_nats.idxmax()]
cp.plots.token_card(beliefs, trace.rows(), events, one.request_id, one.position - 1, token_texts=trace.token_texts)

# %% [markdown]
# Both tokens, layer by layer, for this rejection:

# %%
by_layer = cp.analysis.rejected_tokens(trace, cp.lenses.LogitLens())
mine = by_layer[(by_layer.request_id == one.request_id) & (by_layer.step == one.step)].set_index("layer")
columns = [
    "rejected_token",
    "rejected_rank",
    "rejected_logprob_nats",
    "committed_token",
    "rank",
    "committed_logprob_nats",
]
mine.loc[[12, 20, LAYER, 27, 28, 29], columns].round(2)

# %% [markdown]
# And over all rejections: in how many of them does the layer prefer the rejected token?

# %%
prefers = by_layer.assign(prefers=by_layer.rejected_logprob_nats > by_layer.committed_logprob_nats)
prefers = prefers.groupby("layer").prefers.agg(["sum", "count"])
prefers.loc[[12, 20, LAYER, 27, 28, 29]]

# %% [markdown]
# ## What flips the verdict?
#
# `flip` replaces one state at the position that judged the draft, and lets the model choose again: with zeros, with the
# mean of earlier positions, with the drafter's state, or with the state of the drafted token itself. It does this for
# each layer and site.

# %%
flips = cp.analysis.flip(trace, one.request_id, one.step)
flips.plot()

# %%
flips.table[flips.table.flips][
    ["edit", "site", "layer", "from_layer", "token", "difference_nats", "change_nats"]
].round(2)

# %% [markdown]
# ## A drafter of your own
#
# A drafter needs a name and one function, which returns drafted tokens for each request. This one always drafts "the".

# %%
(the,) = model.encode(" the", add_special_tokens=False)


class AlwaysThe(cp.drafters.Drafter):
    """Drafts the word "the", whatever came before."""

    name = "always_the"
    drafted_layers = 0  # it runs no layer of the model

    def extend(self, context, states):
        return [[] if state.draft else [the] for state in states]


own = cp.run(model, prompts, drafter=AlwaysThe(), **settings)
drafts = own.events().query("phase == 'verify' and draft_token_ids.str.len() > 0")
is_the = [target[0] == the for target in drafts.target_token_ids]
print(own, f"in {sum(is_the)} of {len(drafts)} verify passes the model's own choice was ' the'", sep="\n")

# %% [markdown]
# ## What was found
#
# - At the drafting layer every rejected token was the more likely one of the two: that is why it was drafted. At the
#   last layer the committed token was, in every case: that is why the draft was rejected. The order changes in the
#   layers between.
# - Few edits flip this verdict; the table above has them all. The drafter's state in place of S of the last layer does,
#   as it must. So do zeros in place of what the last layer's MLP adds: without this MLP, the model would have accepted
#   the draft.
# - The drafter that always says "the" is accepted exactly where the model says it too.
# - With both drafters the text is the same. `cp.verify` compares a run with the model alone.

# %%
assert prefers.loc[LAYER, "sum"] == prefers.loc[LAYER, "count"]
assert prefers.loc[model.n_layers - 1, "sum"] == 0
flipping = set(flips.table[flips.table.flips][["edit", "site", "layer"]].itertuples(index=False, name=None))
assert flipping >= {("drafter", "S", model.n_layers - 1), ("zero", "C", model.n_layers - 1)}
assert (drafts.num_accepted == is_the).all() and any(is_the)
assert [own.text(i) for i in range(2)] == [trace.text(i) for i in range(2)]
