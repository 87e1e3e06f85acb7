"""What each optimisation of a pass gains: the time of the pass without it over its time with it, SmolLM2, 2 threads.

Each optimisation is switched off alone, in one process, and the two passes follow each other in turn. A ratio is the
median over neighbouring pairs; above 1.0 the optimisation saves time. Attention runs by request over 96 slots, as in
passes of deterministic requests.

    tapes       operations are recorded once for each shape; later passes call no modules of transformers' blocks
    products    matrix products run in loops compiled for this processor, where they are faster than torch's
    readings    states of 30 layers are read without storing their logits, not as torch's product and statistics
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import cacheprobe as cp
from cacheprobe.kvcache.staged import PassAttention
from cacheprobe.models.fast.tapes import Tapes
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.attention import AttentionSpans, spans_of_positions
from cacheprobe.ops.readout import read_logits
from cacheprobe.trace.recording.lens_reader import LENS_TILE
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
    "tapes": lambda: patch.object(Tapes, "takes", lambda *asked: False),
}
"""By optimisation: switches it off."""


def run(rounds: int, repeats: int = 20) -> dict[str, Any]:
    """without_over_with: by optimisation, dtype and shape, seconds without it over seconds with it.

    repeats: pairs of passes in a round.
    """
    torch.set_num_threads(2)
    found: dict[str, dict[str, float | str]] = {name: {} for name in (*WITHOUT, "products", "readings")}
    with torch.inference_mode(), measuring(len(DTYPES) * len(SHAPES)) as bar:
        for dtype in DTYPES:
            load = partial(cp.load_model, "smollm2-135m", dtype=dtype, progress=False)
            model = load()
            plain = load(products="torch") if model.operations else None
            found["readings"][dtype] = gain(*_readings(model), rounds * repeats) if plain else NOT_HERE
            for said, shape in SHAPES.items():
                key, usual = f"{dtype} {said}", _pass(model, *shape)
                for name, without in WITHOUT.items():
                    found[name][key] = gain(usual, _pass(model, *shape, without), rounds * repeats)
                found["products"][key] = gain(usual, _pass(plain, *shape), rounds * repeats) if plain else NOT_HERE
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


def _readings(model: PlainLM) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns two functions that read one tile of states: the loops, and torch's operations."""
    states = torch.randn(LENS_TILE, model.d_model).to(model.dtype)
    targets = torch.arange(LENS_TILE) % model.d_vocab
    return (
        lambda: model.read_tokens(states, targets, 5),
        lambda: read_logits(model.read_out_with_gradients(states), targets, 5),
    )


def _pass(
    model: PlainLM,
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
        spans = AttentionSpans(tuple(spans_of_positions(start, width, CAPACITY) for _ in rows))
        with without():
            return model.forward(fed, cache, rows, starts, attention=PassAttention(span, spans))

    return one_pass
