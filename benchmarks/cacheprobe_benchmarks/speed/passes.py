"""What each optimisation of a pass gains: the time of the pass without it over its time with it, SmolLM2, 2 threads.

Each optimisation is switched off alone, in one process, and the two passes follow each other in turn. A ratio is the
median over neighbouring pairs; above 1.0 the optimisation saves time. Attention runs by request over 96 slots, as in
passes of deterministic requests.

    modules     the forward calls functions, not the modules of transformers
    attention   few tokens of each request attend in a compiled loop, not in torch's scaled_dot_product_attention
    wide        products of many rows of 16 bits run in float32, where the processor has no fast ones
    compiled    products="compiled": products, norms and rotations compiled for this processor; off by default
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import cacheprobe as cp
from cacheprobe.models.fast.hooked_hf import HookedHF
from cacheprobe.models.paths import choose_path
from cacheprobe.ops.attention import by_request
from cacheprobe.ops.attention.by_request import Reach, reach_of_positions
from cacheprobe.ops.wide_product import wide_rows
from cacheprobe_benchmarks.shared.machine import machine, measuring

CAPACITY, POSITION = 96, 64
SHAPES = {
    "decode 1 x 1": (1, 1, POSITION),
    "decode 16 x 1": (16, 1, POSITION),
    "verify 4 x 16": (4, 16, POSITION),
    "prefill 1 x 64": (1, 64, 0),
}
"""Requests, tokens of each, and the position of the first."""
DTYPES = ("bfloat16", "float32")
SMALL: dict[str, Any] = dict(repeats=1)
NOT_HERE = "not used on this processor"

WITHOUT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "modules": lambda: patch.object(HookedHF, "_lean_forward", lambda *asked: None),
    "attention": lambda: patch.object(by_request, "serves", lambda q: False),
}
"""By optimisation: switches it off."""


def run(rounds: int, repeats: int = 20) -> dict[str, Any]:
    """without_over_with: by optimisation, dtype and shape, seconds without it over seconds with it.

    repeats: pairs of passes in a round.
    """
    torch.set_num_threads(2)
    found: dict[str, dict[str, float | str]] = {name: {} for name in (*WITHOUT, "wide", "compiled")}
    with torch.inference_mode(), measuring(len(DTYPES) * len(SHAPES)) as bar:
        for dtype in DTYPES:
            model = _fast(dtype)
            narrow, compiled = (_narrow(dtype), _fast(dtype, "compiled")) if _is_slow(dtype) else (None, None)
            for said, shape in SHAPES.items():
                key, usual = f"{dtype} {said}", _pass(model, *shape)
                for name, without in WITHOUT.items():
                    found[name][key] = gain(usual, _pass(model, *shape, without), rounds * repeats)
                found["wide"][key] = gain(usual, _pass(narrow, *shape), rounds * repeats) if narrow else NOT_HERE
                found["compiled"][key] = (
                    gain(_pass(compiled, *shape), usual, rounds * repeats) if compiled else NOT_HERE
                )
                bar.advance(note=key)
    return {"benchmark": "passes", "rounds": rounds, "repeats": repeats, "without_over_with": found, **machine()}


def gain(usual: Callable[[], object], without: Callable[[], object], pairs: int) -> float:
    """Returns the median of the seconds without the optimisation over those with it, after one pair unmeasured."""
    ratios = []
    for _ in range(1 + pairs):
        began = time.perf_counter()
        without()
        between = time.perf_counter()
        usual()
        ratios.append((between - began) / (time.perf_counter() - between))
    return round(median(ratios[1:]), 2)


def _is_slow(dtype: str) -> bool:
    """Returns whether the processor computes many rows of this dtype more slowly than float32."""
    return wide_rows(getattr(torch, dtype), torch.device("cpu")) is not None


def _fast(dtype: str, products: str = "torch") -> HookedHF:
    model, _ = choose_path(cp.load_model("smollm2-135m", dtype=dtype, products=products, progress=False))
    assert isinstance(model, HookedHF)
    return model


def _narrow(dtype: str) -> HookedHF:
    with patch("cacheprobe.models.fast.hooked_hf.wide_rows", lambda *asked: None):
        return _fast(dtype)


def _pass(
    model: HookedHF,
    requests: int,
    width: int,
    start: int,
    without: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[], object]:
    """Returns a function that runs one pass; each pass writes the same positions."""
    cache = model.new_cache(requests, CAPACITY)
    rows = [cache.allocate() for _ in range(requests)]
    ids = torch.arange(requests * CAPACITY).view(requests, CAPACITY) % 997
    if start:
        model.forward(ids[:, :start], cache, rows, [0] * requests)
    fed, starts = ids[:, start : start + width], [start] * requests
    span = start + width

    def one_pass() -> object:
        reach = Reach(tuple(reach_of_positions(start, width, CAPACITY) for _ in rows))
        with without(), cache.attending_to(span, reach, None):
            return model.forward(fed, cache, rows, starts)

    return one_pass
