"""What the suites of other engines run on here: models whose batches really change bits, and random prompts."""

import random
from functools import cache

import torch

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from cacheprobe_benchmarks.shared.tiny import NEAR_TIES, WIDE, tiny_model


@cache
def near_tied(dtype: str) -> CachedLM:
    """Returns a random model in which every second token's logit is nearly its neighbour's.

    A change of the last bits then changes tokens too, which it seldom does in an ordinary tiny model.
    """
    if dtype == "float32":
        return cp.load_model(tiny_model("llama", torch.float32, size=NEAR_TIES))
    return cp.load_model(tiny_model("qwen3", torch.bfloat16, size=WIDE))


@cache
def smollm2() -> CachedLM:
    return cp.load_model("smollm2-135m", dtype="bfloat16", progress=False)


def random_prompt(draw: random.Random, model: CachedLM, shortest: int, longest: int) -> list[int]:
    return [draw.randrange(1, model.d_vocab) for _ in range(draw.randint(shortest, longest))]
