"""What reading Z costs beyond its product: all 30 layers of a 16-token window of SmolLM2, bfloat16, 2 threads.

Against the bare product of the same states and the unembedding, [480, 576] x [576, 49152], by the fastest way known on
this machine (torch's in bfloat16 or float32, or the compiled loops'); in turn in one process, ratio of medians. The
reading is the recorder's own: final norm, product in tiles of a fixed height, top-5, log-sum-exp, entropy, rank and
log-probability of a given token.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.recording.lens_reader import LENS_TILE, LensReader, Queued
from cacheprobe_benchmarks.shared.machine import machine, measuring

TOKENS, TOP_K, REPEATS = 16, 5, 3
SMALL = {"tokens": 2, "repeats": 1}


def run(rounds: int, *, tokens: int = TOKENS, repeats: int = REPEATS) -> dict[str, Any]:
    """over_matmul: the whole reading over the bare product; lower is better. Each is timed rounds x repeats times."""
    torch.set_num_threads(2)
    model = cp.load_model("smollm2-135m", dtype="bfloat16")
    states, targets = _window(model, tokens)
    flat = states.flatten(0, 1)
    wide, wide_weight = flat.float(), model.unembedding.float()
    jobs: dict[str, Callable[[], object]] = {
        "torch bfloat16": lambda: flat @ model.unembedding.T,
        "torch float32": lambda: linear(wide, wide_weight),
        "reading": lambda: _read(model, states, targets),
    }
    if operations := model.operations:
        jobs["loops bfloat16"] = lambda: operations.product(flat, model.unembedding)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    with torch.inference_mode(), measuring((rounds * repeats + 1) * len(jobs)) as bar:
        for number in range(rounds * repeats + 1):
            for name, job in jobs.items():
                began = time.perf_counter()
                job()
                if number:  # the first round is not timed: first calls allocate
                    seconds[name].append(time.perf_counter() - began)
                bar.advance(note=name)
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "benchmark": "lens",
        "rounds": rounds,
        "rows": len(flat),
        "d_model": model.d_model,
        "d_vocab": model.d_vocab,
        "tile": LENS_TILE,
        "over_matmul": round(medians["reading"] / min(medians[way] for way in medians if way != "reading"), 2),
        "seconds_median": {name: round(value, 4) for name, value in medians.items()},
        **machine(),
    }


def _window(model: CachedLM, tokens: int) -> tuple[Tensor, Tensor]:
    """States [t, l, m] of the last tokens of a prompt, and the token that followed each [t]."""
    prompt = cp.tasks.CoinFlip(people=4).examples(n=1, seed=0)[0].prompt
    trace = cp.run(model, prompt, capture="S", max_new_tokens=2, progress=False)
    states = torch.stack([trace.states("S", layer, 0)[-tokens:] for layer in range(model.n_layers)], dim=1)
    text = [*(trace.requests[0].prompt_token_ids or ()), *trace.committed(0)]
    return states.contiguous(), torch.tensor(text[-tokens:])


def _read(model: CachedLM, states: Tensor, targets: Tensor) -> dict[str, Any]:
    reader = LensReader(model, cp.lenses.LogitLens(), TOP_K)
    layers = torch.arange(model.n_layers)
    for row in range(len(states)):
        reader.queue_resolved(Queued(row, row, states[row], layers, int(targets[row])))
    return reader.take()
