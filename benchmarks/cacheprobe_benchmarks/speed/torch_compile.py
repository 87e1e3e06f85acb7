"""Whether torch.compile pays for a decode pass: SmolLM2, bfloat16, 16 rows at 64 of 96 slots, 2 threads.

Hugging Face's model with its static cache, eager and compiled by inductor (fixed shapes, weights frozen into the graph,
of which it keeps copies in an order of its own), beside our forward. Nothing is captured: a compiled graph would
have to return every state that is to be kept.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.kvcache.staged import PassAttention
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.attention import AttentionSpans, spans_of_positions
from cacheprobe_benchmarks.shared.hugging_face import HuggingFace
from cacheprobe_benchmarks.shared.machine import machine, measuring

ROWS, CAPACITY, POSITION = 16, 96, 64
REPEATS = 20
"""Passes of each way in a round."""
SMALL = {"repeats": 1}
"""The graph is compiled all the same, which takes a minute or more."""


def run(rounds: int, *, repeats: int = REPEATS) -> dict[str, Any]:
    """*_over_ours: seconds of a decode pass over those of our forward; lower is better."""
    torch.set_num_threads(2)
    model = cp.load_model("smollm2-135m", dtype="bfloat16")
    ways = {"ours": _ours(model)}
    hf = HuggingFace().model
    ways["hf_eager"] = _static(hf, hf.forward)
    began = time.perf_counter()
    ways["hf_torch_compile"] = _compiled(hf)
    ways["hf_torch_compile"]()
    compiling = time.perf_counter() - began
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode(), measuring(rounds) as bar:
        for _ in range(rounds):
            for name, way in ways.items():
                way()
                taken[name].append(_seconds(way, repeats))
            bar.advance()
    return {
        "benchmark": "torch-compile",
        "rounds": rounds,
        **{
            f"{name}_over_ours": round(median(a / b for a, b in zip(of, taken["ours"], strict=True)), 2)
            for name, of in taken.items()
            if name != "ours"
        },
        "seconds_of_compiling": round(compiling, 1),
        "milliseconds_median": {name: round(1000 * median(of), 1) for name, of in taken.items()},
        **machine(),
    }


def _seconds(way: Callable[[], Tensor], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        way()
        taken.append(time.perf_counter() - began)
    return median(taken)


def _ours(fast: CachedLM) -> Callable[[], Tensor]:
    cache = fast.new_cache(ROWS, CAPACITY)
    rows = [cache.allocate() for _ in range(ROWS)]
    ids = torch.zeros(ROWS, POSITION, dtype=torch.long)
    fast.forward(ids, cache, rows, [0] * ROWS)

    def step() -> Tensor:
        spans = AttentionSpans(tuple(spans_of_positions(POSITION, 1, CAPACITY) for _ in rows))
        attention = PassAttention(spans=spans)  # as the loop does in a decode pass
        return fast.forward(ids[:, :1], cache, rows, [POSITION] * ROWS, attention=attention)

    return step


def _static(hf: Any, forward: Callable[..., Any]) -> Callable[[], Tensor]:
    from transformers import StaticCache

    cache = StaticCache(config=hf.config, max_cache_len=CAPACITY)
    ids, at = torch.zeros(ROWS, POSITION, dtype=torch.long), torch.full((ROWS, 1), POSITION)
    mask = (torch.arange(CAPACITY) <= POSITION).repeat(ROWS, 1)
    with torch.inference_mode():
        hf(ids, past_key_values=cache, use_cache=True)

    def step() -> Tensor:
        for layer in cache.layers:  # each pass writes the same slot
            layer.cumulative_length.fill_(POSITION)
        with torch.inference_mode():
            return forward(
                ids[:, :1], past_key_values=cache, position_ids=at, attention_mask=mask, use_cache=True
            ).logits

    return step


def _compiled(hf: Any) -> Callable[[], Tensor]:
    import torch._inductor.config as inductor

    inductor.freezing = True
    return _static(hf, torch.compile(hf.forward, dynamic=False))
