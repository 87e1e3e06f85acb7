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
# # Which layer decides?
#
# Every layer of a transformer can be read as a guess of the next token. At some layer the guess becomes what the model
# will say. This notebook finds that layer in three ways, on ordinary text with SmolLM2-135M, and then asks the same of
# a model that is trained on the spot.

# %%
import pandas as pd
import torch

import cacheprobe as cp

model = cp.load_model("smollm2-135m")
prompts = [
    "The capital of France is",
    "Water freezes at zero degrees and boils at one hundred",
    "Once upon a time, there was a little girl who lived",
    "To make a cup of tea, first boil the water, then",
    "The sun rises in the east and sets in the",
    "Monday, Tuesday, Wednesday, Thursday,",
]
trace = cp.run(model, prompts, max_new_tokens=16)
for request_id, prompt in enumerate(prompts):
    print(f"{prompt}[{trace.text(request_id)}]")

# %% [markdown]
# ## 1. Reading: from which layer on is the first choice the final one?
#
# The logit lens reads a first choice from every layer. The prediction depth of a token is the layer from which this
# choice no longer changes.

# %%
depths = cp.analysis.prediction_depth(trace)
quartiles = depths.prediction_depth.quantile([0.25, 0.5, 0.75])
print("quartiles:", quartiles.tolist(), "of layers 0 to", model.n_layers - 1)
depths[["request_id", "position", "prediction_depth", "num_flips", "path"]].head(4)

# %%
cp.plots.prediction_depth_figure(depths)

# %% [markdown]
# A lens is one way to read a state. This one of our own compares directions: a token's score is the cosine between the
# state and the token's unembedding vector. At the last layer a lens must give the model's own output.


# %%
class Direction(cp.lenses.Lens):
    """Scores each token by the cosine between the state and its unembedding vector."""

    name = "direction"

    def logits(self, model, states, layers):
        unit = torch.nn.functional.normalize
        cosine = unit(states, dim=-1) @ unit(model.unembedding, dim=-1).T
        return torch.where((layers == model.n_layers - 1)[:, None], model.read_out(states), 20 * cosine)


# %%
layers = range(4, model.n_layers, 5)
readings = {
    lens.name: cp.analysis.read_states(trace, lens, layers=layers) for lens in (cp.lenses.LogitLens(), Direction())
}
shares = pd.DataFrame({name: table.groupby("layer").agrees.mean() for name, table in readings.items()})
print("how often a layer's first choice is the final token:")
shares.round(2)

# %% [markdown]
# ## 2. Adding up: which layers write the token?
#
# With the final norm's scale held fixed, a logit is a sum of what each layer's attention and MLP wrote. Here it is the
# logit of the token after "The capital of France is".

# %%
position = len(trace.requests[0].prompt_token_ids) - 1
parts = cp.analysis.attribution(trace, 0, position)
cp.plots.attribution(parts)

# %% [markdown]
# ## 3. Changing: which state carries the answer?
#
# Reading and adding up do not say what causes the answer. Patching does. The prompt about Italy is run again and again,
# each time with one state of the prompt about France. A value of 1 means that the model now answers for France, and 0
# that it still answers for Italy.

# %%
grid = cp.patching.activation(model, prompts[0], "The capital of Italy is")
cp.plots.patching_grid(grid)

# %%
nld = grid.table.pivot(index="layer", columns="position", values="nld")
country, end = nld.columns[-2:]
handover = int((nld[end] > nld[country]).idxmax())
attention = parts[parts.site == "T"].set_index("layer").logit
print(f"from layer {handover} on, the last position carries more of the answer than the country does")
print(f"of all layers' attention, that of layer {attention.idxmax()} adds most to the logit of the answer")

# %% [markdown]
# ## A model of your own
#
# A Llama of six layers learns one sentence by heart. Then it is asked the first question again.

# %%
from transformers import LlamaConfig, LlamaForCausalLM

rhyme = (
    "Twinkle, twinkle, little star, how I wonder what you are! Up above the world so high, like a diamond in the sky."
)
token_ids = torch.tensor([model.encode(rhyme)])
torch.manual_seed(0)
shape = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, tie_word_embeddings=True
)
mine = LlamaForCausalLM(LlamaConfig(vocab_size=len(model.tokenizer), **shape))
optimizer = torch.optim.AdamW(mine.parameters(), lr=4e-3)
for _ in range(80):
    loss = mine(token_ids, labels=token_ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss of the last step: {loss.item():.3f} nats")

# %%
own = cp.run(cp.load_model(mine.eval(), model.tokenizer), "Twinkle, twinkle, little", max_new_tokens=16)
own_depths = cp.analysis.prediction_depth(own).prediction_depth
print(own.text(0), f"(median prediction depth: layer {own_depths.median():g} of 0 to 5)", sep="\n")
cp.plots.lens_grid(own.hypotheses(), request_id=0)

# %% [markdown]
# ## What was found
#
# - Half of SmolLM2's tokens are decided in its last few layers: the median prediction depth is printed above.
# - What the lower layers say depends on the lens. At the last layer both lenses agree.
# - In the first layer the country's name carries the whole answer, and in the last layer the last position does. The
#   answer moves in one layer, and the sum says the same: no other layer's attention adds as much. Later layers make it
#   the most likely word.
# - The small model has learned its sentence by heart, and decides in its first layers.

# %%
assert quartiles[0.5] > 2 / 3 * model.n_layers
assert (shares.iloc[-1] == 1).all()
assert nld[country].iloc[0] > 0.9 and nld[end].iloc[0] < 0.1  # in the first layer, the country's state is the answer
assert nld[country].iloc[-1] < 0.1 and nld[end].iloc[-1] > 0.9  # in the last, the last position's is
assert handover == attention.idxmax()
assert own_depths.median() <= 2
assert rhyme.startswith("Twinkle, twinkle, little" + own.text(0))
