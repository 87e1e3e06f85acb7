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
# # What did the model believe while another engine generated?
#
# Text often comes from somewhere else: Hugging Face's `generate`, a vLLM server, or an API that returns text alone.
# This notebook imports all three, and reads what SmolLM2 believed at each token.

# %%
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import cacheprobe as cp
from cacheprobe.models.loaders import plain_model

# %% [markdown]
# ## Another engine generates
#
# A plain transformers model, and `generate` with sampling, so that some tokens are not the model's first choice.

# %%
engine, tokenizer, _ = plain_model("smollm2-135m", "float32")
tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
prompts = ["The best thing about a rainy day is", "My favourite book is about a boy who"]
batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
torch.manual_seed(1)
outputs = engine.generate(
    **batch,
    max_new_tokens=16,
    do_sample=True,
    temperature=1.0,
    return_dict_in_generate=True,
    output_hidden_states=True,
    output_logits=True,
)
print(*tokenizer.batch_decode(outputs.sequences, skip_special_tokens=True), sep="\n")

# %% [markdown]
# ## 1. From Hugging Face's generate
#
# The import is a trace with the usual tables. It says what the other program did not keep.

# %%
model = cp.load_model("smollm2-135m")
trace = cp.import_generate(outputs, attention_mask=batch["attention_mask"], model=model)
print(trace, *trace.missing.items(), sep="\n")

# %%
beliefs = trace.hypotheses()
cp.plots.lens_grid(beliefs, request_id=0)

# %% [markdown]
# The engine's sampling chose some tokens that the model found unlikely. The log-probabilities are those of the engine;
# the ranks are from layer 28, the last one whose states `generate` keeps.

# %%
said = beliefs[(beliefs.request_id == 0) & (beliefs.layer == 28)].set_index("position")
said = said.assign(logprob_of_engine=trace.logprobs(0))
said[["read_token", "committed_token", "logprob_of_engine", "rank", "token"]].sort_values("logprob_of_engine").head(5)

# %% [markdown]
# ## 2. From vLLM's files
#
# vLLM can write hidden states, one safetensors file for each request: `hidden_states` [tokens, layers, width] and
# `token_ids`. We write such a file from the same tensors, since vLLM is not installed here. vLLM's layer number k is
# the stream that enters block k, so S of layer k - 1.

# %%
numbers, folder = [6, 12, 24], tempfile.TemporaryDirectory()
prompt_length = int(batch["attention_mask"][0].sum())
start = batch["input_ids"].shape[1] - prompt_length
passes = [torch.stack([of_pass[k][0] for k in numbers], dim=1) for of_pass in outputs.hidden_states]
dump = {
    "hidden_states": torch.cat(passes)[start:].contiguous(),
    "token_ids": outputs.sequences[0, start:-1].contiguous(),
}
save_file(dump, Path(folder.name) / "request-0.safetensors")

from_vllm = cp.import_vllm(folder.name, layers=numbers, num_prompt_tokens=prompt_length, model=model)
difference = (from_vllm.states("S", 11, 0) - trace.states("S", 11, 0)).abs().max().item()
print(from_vllm, f"largest difference from the states of the first import: {difference}", sep="\n")

# %% [markdown]
# ## 3. From text alone
#
# An API returns text and no states. Then prompt and text are given to the model together, and the states of this longer
# prompt are read. They are the engine's states, up to rounding, as far as the text splits into the tokens that the
# engine chose.

# %%
response = {"choices": [{"text": trace.text(1), "index": 0, "finish_reason": "length"}]}
text = prompts[1] + response["choices"][0]["text"]
again = cp.run(model, text, capture="STC", max_new_tokens=1)
token_ids = again.requests[0].prompt_token_ids
rows = again.rows(0).query("role == 'prompt'")
readings = cp.analysis.read_states(again, cp.lenses.LogitLens(), rows=rows)
first = len(trace.requests[1].prompt_token_ids) - 1
cp.plots.lens_grid(readings, request_id=0, positions=range(first, first + 16))

# %%
engine_ids = [*trace.requests[1].prompt_token_ids, *trace.committed(1)]
pairs = list(zip(token_ids, engine_ids[:-1], strict=False))
same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
ours, theirs = again.states("S", 20, 0)[:same], trace.states("S", 20, 1)[:same]
rounding = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max().item()
print(f"the first {same} tokens are the same; largest relative difference of their states: {rounding:.0e}")

# %% [markdown]
# ## What was found
#
# - The engine's sampling chose tokens that the model found unlikely, and the trace shows what each layer would have
#   said instead.
# - A dump in vLLM's layout gives the same states as `generate`, for the layers that it holds.
# - From text alone the states can be computed again. They differ from the engine's by rounding only.

# %%
assert len(said) == len(trace.committed(0)) and (said["rank"] > 0).any()
assert difference == 0
assert same >= len(trace.requests[1].prompt_token_ids)
assert rounding < 1e-3  # float32: one pass over the whole text instead of one for each token
assert {"T", "C", "S of layer 29"} <= set(trace.missing)
