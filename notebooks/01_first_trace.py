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
# # What does a first trace show?
#
# cacheprobe generates text with a language model and records a *trace*: the states of every layer for every token, and
# what each layer would have said next. This notebook records ordinary text with SmolLM2-135M, and then with a model
# of one's own.

# %%
import cacheprobe as cp

model = cp.load_model("smollm2-135m")
prompts = [
    "The capital of France is",
    "Once upon a time, there was a little girl who",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
]
trace = cp.run(model, prompts, max_new_tokens=12)
trace

# %%
for request_id, prompt in enumerate(prompts):
    print(f"{prompt}[{trace.text(request_id)}]")

# %% [markdown]
# ## Tokens: one row for each token of each pass
#
# The prompt is computed in a prefill pass, and each later token in a decode pass. The row at position p reads the token
# at p and predicts the token at p + 1.

# %%
rows = trace.rows(0)
rows[["row", "step", "phase", "status", "position", "token"]].head(8)

# %% [markdown]
# ## What every layer would have said
#
# The logit lens turns the state of each layer into a prediction. Each column of the picture is one position, and each
# line one layer. A cell names the layer's most likely next token. It is outlined if that is the token that was
# generated.

# %%
beliefs = trace.hypotheses()
cp.plots.lens_grid(beliefs, request_id=0)

# %% [markdown]
# The same readings are a table, with one line for each row and layer:

# %%
columns = ["read_token", "layer", "token", "committed_token", "rank", "logprob_nats", "entropy_nats"]
beliefs[(beliefs.request_id == 0) & (beliefs.position == 5)][columns].iloc[4::5].round(2)

# %% [markdown]
# ## States
#
# S is the residual stream after a block. T and C are what the block's attention and MLP added to it. So S of one layer
# is S of the layer below, plus T, plus C.

# %%
below, T, C, S = (
    trace.states(site, layer, request_id=0) for site, layer in [("S", 11), ("T", 12), ("C", 12), ("S", 12)]
)
gap = float((S - (below + T + C)).abs().max() / S.abs().max())
print(f"S of layer 12: {tuple(S.shape)}, one line for each position; largest difference from the sum: {gap:.0e}")

# %% [markdown]
# ## A trace can be stored
#
# The digest is a hash of a request's tokens and states.

# %%
import tempfile

folder = tempfile.TemporaryDirectory()
stored = cp.load_trace(trace.save(f"{folder.name}/first"))
print(stored, stored.digest(0) == trace.digest(0), sep="\n")

# %% [markdown]
# ## A model of your own
#
# `load_model` also takes a Hugging Face name, a folder, or a transformers model that is already in memory. Here that is
# a small GPT-2 with random weights. It uses SmolLM2's tokenizer.

# %%
import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(n_layer=4, n_head=4, n_embd=64, n_positions=128, vocab_size=len(model.tokenizer))
mine = GPT2LMHeadModel(config).eval()
mine.save_pretrained(f"{folder.name}/mine")

in_memory = cp.run(cp.load_model(mine, model.tokenizer), prompts, max_new_tokens=6)
from_folder = cp.run(cp.load_model(f"{folder.name}/mine", model.tokenizer), prompts, max_new_tokens=6)
print(repr(in_memory.text(0)))
cp.plots.lens_grid(in_memory.hypotheses(), request_id=0)

# %% [markdown]
# ## What was found
#
# - After "The capital of France is" the model says " Paris", and the lens grid shows in which layer this becomes the
#   first choice. In the last layer the first choice is always the generated token, because each token was the most
#   likely one.
# - Each position has one row, except for the newest token, which nothing has read yet.
# - S is S of the layer below plus T plus C, up to rounding.
# - The stored trace has the same tokens and states. A model of one's own gives the same tables, and the same tokens
#   from memory as from a folder.

# %%
last = beliefs[beliefs.layer == model.n_layers - 1]
assert trace.text(0).startswith(" Paris")
assert last.agrees.all()
assert rows.position.tolist() == list(range(len(trace.requests[0].prompt_token_ids) + len(trace.committed(0)) - 1))
assert gap < 1e-5  # float32
assert stored.digest(0) == trace.digest(0)
assert [in_memory.committed(i) for i in range(3)] == [from_folder.committed(i) for i in range(3)]
