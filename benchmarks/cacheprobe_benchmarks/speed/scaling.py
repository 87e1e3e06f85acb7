"""How the cost of recording grows: with the batch, the context, the layers that are kept, and the length of a trace.

SmolLM2, bfloat16, 2 threads, end-of-sequence ignored. The first three are seconds of a run that keeps S, T and C over
those of the same run that keeps nothing, neighbours in time. The length of a trace is one deterministic request of
2,000 tokens in one fixed capacity, S, T and C of all layers kept, verified token by token: every pass attends to the
whole capacity then, so that what is left to grow is recording. Longer windows are drafted by passes that attend to
what is in use, which grows.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.models.base import CachedLM
from cacheprobe_benchmarks.shared.machine import machine, measuring

WINDOW = 1
"""Of the verifier, in the long trace."""


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    batches: Sequence[int] = (1, 4, 16)
    contexts: Sequence[int] = (16, 128, 512)
    layers: Sequence[int] = (1, 10, 20, 30)
    new_tokens: int = 32
    long: int = 2_000
    """Tokens of the long trace."""
    capacity: int = 2_048
    """Of the long trace, in tokens."""
    piece: int = 64
    """Tokens whose cost is taken together."""


SMALL = {"sizes": Sizes((1, 2), (8,), (1, 3), new_tokens=6, long=80, capacity=96, piece=16)}


def run(rounds: int, *, sizes: Sizes = Sizes()) -> dict[str, Any]:
    """*_over_nothing: by size, lower is better. last_over_first: cost of the last tokens of a trace over the first."""
    torch.set_num_threads(2)
    return measure(cp.load_model("smollm2-135m", dtype="bfloat16"), rounds, sizes)


def measure(model: CachedLM, rounds: int, of: Sizes) -> dict[str, Any]:
    """Measures the same with a model that is loaded."""
    sizes = [
        *(("batch", size, [_prompt(model, 48, n) for n in range(size)], "all") for size in of.batches),
        *(("context", size, [_prompt(model, size, n) for n in range(4)], "all") for size in of.contexts),
        *(("layers", size, [_prompt(model, 48, n) for n in range(4)], range(size)) for size in of.layers),
    ]
    ratios: dict[tuple[str, int], list[float]] = {(name, size): [] for name, size, *_ in sizes}
    flat: list[list[float]] = []
    with measuring((rounds + 1) * len(sizes) + rounds) as bar:
        for number in range(rounds + 1):
            for name, size, prompts, layers in sizes:
                nothing = _seconds(model, prompts, of.new_tokens, None, "all")
                kept = _seconds(model, prompts, of.new_tokens, "STC", layers)
                if number:  # the first round allocates
                    ratios[name, size].append(kept / nothing)
                bar.advance(note=f"{name} {size}")
            if number:
                flat.append(list(_costs(model, of)))
                bar.advance(note=f"{of.long} tokens")
    over = {
        f"{kind}_over_nothing": {str(size): round(median(r), 3) for (name, size), r in ratios.items() if name == kind}
        for kind in ("batch", "context", "layers")
    }
    costs = [median(of_rounds) for of_rounds in zip(*flat, strict=True)]
    third = len(costs) // 3
    return {
        "benchmark": "scaling",
        "rounds": rounds,
        **over,
        "last_over_first": round(median(costs[-third:]) / median(costs[:third]), 3),
        "milliseconds_per_token": [round(1000 * cost, 1) for cost in costs],
        "tokens_a_cost": of.piece,
        "capacity": of.capacity,
        **machine(),
    }


def _prompt(model: CachedLM, length: int, number: int) -> list[int]:
    """Token ids without a meaning: what a text says does not change what it costs."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(model.d_vocab, (length,), generator=draw).tolist()


def _seconds(model: CachedLM, prompts: list[list[int]], new_tokens: int, capture: str | None, layers: Any) -> float:
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
    shape = dict(capacity=max(map(len, prompts)) + new_tokens + 80, prefill_chunk=64)
    began = time.perf_counter()
    cp.run(model, prompts, sampling=sampling, progress=False, capture=capture, layers=layers, **shape)
    return time.perf_counter() - began


def _costs(model: CachedLM, of: Sizes) -> Iterator[float]:
    """Seconds per token, piece after piece, behind the prompt, which is one piece long."""
    prompt = _prompt(model, of.piece, 0)
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=of.long - len(prompt))
    settings = dict(sampling=sampling, deterministic=True, capture="STC", capacity=of.capacity, window=WINDOW, group=1)
    stream = iter(cp.stream(model, [prompt], **settings))
    next(stream)  # ends the prompt
    done, began = 0, time.perf_counter()
    for piece in stream:
        done += len(piece.token_ids)
        if done >= of.piece:
            now = time.perf_counter()
            yield (now - began) / done
            done, began = 0, now
