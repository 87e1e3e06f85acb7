"""What the suites of other engines run on here: models whose batches really change bits, and random traffic."""

import random
from functools import cache
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from cacheprobe_benchmarks.shared.tiny import NEAR_TIES, WIDE, tiny_model

SETTINGS: dict[str, Any] = dict(capacity=128, progress=False)
"""Window, group and prefill are left to the run's own choice."""

Answer = tuple[tuple[int, ...], tuple[float, ...], str]


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


def sampling(temperature: float, max_new_tokens: int) -> cp.SamplingParams:
    """Returns sampling with the same seed for every request, so that equal prompts must get equal answers."""
    return cp.SamplingParams(temperature=temperature, seed=20240919, max_new_tokens=max_new_tokens, stop_token_ids=())


def answer(trace: cp.Trace, request_id: int) -> Answer:
    """Returns the tokens, their log-probabilities, and the digest of all captured states, for comparison by bits."""
    return tuple(trace.committed(request_id)), tuple(trace.logprobs(request_id)), trace.digest(request_id)
