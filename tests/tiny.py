"""The project's tiny models behind our loader, and what most tests feed them."""

import copy
from functools import cache

import pytest
import torch

import cacheprobe as cp
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe_benchmarks.shared.tiny import FAMILIES, SLIDING, VOCAB
from cacheprobe_benchmarks.shared.tiny import tiny_model as hf_model

__all__ = [
    "FAMILIES",
    "PROMPTS",
    "QUICK",
    "QUICK_FAMILIES",
    "SLIDING",
    "SMALL",
    "VOCAB",
    "by_modules",
    "hf_model",
    "loaded",
    "perturbed",
]


@cache
@torch.inference_mode(False)  # a test may ask for the model first inside of it; others, later, need gradients
def loaded(family: str = "llama", dtype: torch.dtype = torch.float32, window: int | None = None) -> PlainLM:
    """The same weights as `hf_model`, behind our loader."""
    return cp.load_model(hf_model(family, dtype, window=window))


def by_modules(model: PlainLM) -> PlainLM:
    """The same weights, in a forward that calls the modules in every pass."""
    other = PlainLM(model.live, model.tokenizer, model.name)
    other.use_operations(model.operations)
    other.tapes = None
    return other


def perturbed(model: PlainLM, scale: float, seed: int = 1) -> PlainLM:
    """A copy of a tiny model whose weights were moved a little: agrees often, and not always."""
    live = copy.deepcopy(hf_model("llama", model.dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in live.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight.dtype)
    return cp.load_model(live)


QUICK = ("llama", "gpt2", "gemma3")
"""Families that differ most. A slow test of every family takes these in `make test`, and all in `make test-all`."""
QUICK_FAMILIES = [pytest.param(f, marks=[] if f in QUICK else [pytest.mark.slow]) for f in FAMILIES]


PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3] * 40, [11, 12], [50, 51, 52, 53, 54, 55, 56]]
SMALL = dict(window=4, group=2, capacity=96, max_new_tokens=20, progress=False)
