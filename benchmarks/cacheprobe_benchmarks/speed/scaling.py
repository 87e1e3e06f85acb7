"""How does time grow with batch, prompt, layers, vocabulary, generated tokens and requests: in proportion, or faster?

Each axis is one size that grows while the others stay. Its slope is that of log seconds over log size; 1 is linear.
A run has fixed costs, which hide growth at small sizes. So the slope is fitted to the upper half of the sizes.

batch: seconds of a run over the number of requests that run at once.
prompt: seconds of a prefill over the prompt's tokens. Every token attends to all earlier ones, so attention is
    quadratic. It is measured alone, with the same shapes and masks, and subtracted.
layers: seconds of a run over the number of blocks.
vocabulary: seconds of a run that reads Z over the number of tokens in the vocabulary.
tokens, pieces: seconds of `cp.run` and `cp.stream` over the number of generated tokens of one request, less attention.
    The slope is 1 if recording a later token takes no longer than recording an early one.
requests, samples: seconds of a run over the number of short requests, of which 16 run at once and the others wait.
    The prompts of `requests` differ; those of `samples` are equal, so that all but the first ones copy their keys.
hypotheses, save, each_request: seconds of `trace.hypotheses`, `trace.save`, and one state and the log-probabilities of
    every request, over the number of requests.

Models are random Llamas. One thread; processor seconds, which other programs change little. S, T and C are captured.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Any

import torch

import cacheprobe as cp
from cacheprobe.kvcache.staged import PassAttention, StagedCache
from cacheprobe.models.base import CachedLM
from cacheprobe.models.hf.attention import attend_over_cache
from cacheprobe_benchmarks.shared.machine import machine, measuring
from cacheprobe_benchmarks.shared.tiny import TINY, Size, tiny_model

MOST = 1.05
"""Largest slope that counts as linear."""
SMALL_MODEL = Size(2048, hidden=256, mlp=768, layers=4, heads=4, initializer_range=0.02)
DEEP_MODEL = Size(512, hidden=128, mlp=384, layers=4, heads=4, initializer_range=0.02)
PREFILL_WIDTH = 128
"""Tokens of a prompt in one prefill pass of a request that is never verified."""
_T_QUANTILE = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantile .975 of Student's t for 1, 2, ... degrees of freedom; the last one also serves for more."""


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of each axis, ascending."""

    batch: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    prompt: Sequence[int] = (16, 64, 256, 1024, 4096)
    layers: Sequence[int] = (2, 4, 8, 16, 32)
    vocabulary: Sequence[int] = (1024, 4096, 16_384, 65_536)
    tokens: Sequence[int] = (128, 256, 512, 1024, 2048)
    requests: Sequence[int] = (62, 125, 250, 500, 1000)


SMALL = {"sizes": Sizes((1, 2, 4), (8, 16, 32), (1, 2, 3), (64, 128, 256), (8, 16, 32), (20, 40, 80))}


def run(rounds: int, *, sizes: Sizes = Sizes()) -> dict[str, Any]:
    """Returns by axis: slope (with a 95 % interval), is_linear, sizes, median seconds, and attention's median seconds,
    which were subtracted."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # what exists already costs no collection that falls into a timing
    try:
        return measure(rounds, sizes)
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)


def measure(rounds: int, of: Sizes) -> dict[str, Any]:
    """Measures and fits every axis; a round measures every size of every axis once."""
    most = max(len(getattr(of, name)) for name in JOBS)
    jobs = [(name, size) for i in range(most) for name in JOBS for size in getattr(of, name)[i : i + 1]]
    smallest = jobs[: len(JOBS)]
    seconds: dict[str, dict[int, list[float]]] = {}
    apart: dict[str, dict[int, list[float]]] = {}
    with measuring(len(smallest) + rounds * len(jobs)) as bar:
        for number in range(rounds + 1):
            for name, size in jobs if number else smallest:
                for axis, (took, attention) in JOBS[name](size).items():
                    if number:  # the first calls import and compile
                        seconds.setdefault(axis, {}).setdefault(size, []).append(took - attention)
                        apart.setdefault(axis, {}).setdefault(size, []).append(attention)
                bar.advance(note=f"{name} {size}")
    axes = {axis: {**_fit(by_size), **_apart(apart[axis])} for axis, by_size in seconds.items()}
    return {
        "benchmark": "scaling",
        "rounds": rounds,
        "slopes": {axis: fit["slope"] for axis, fit in axes.items()},
        "not_linear": [axis for axis, fit in axes.items() if not fit["is_linear"]],
        "most": MOST,
        "axes": axes,
        "of_each_round": {
            axis: [_fit({size: [took[number]] for size, took in by_size.items()})["slope"] for number in range(rounds)]
            for axis, by_size in seconds.items()
        },
        "lower_is_better": list(axes),
        **machine(),
    }


def _fit(by_size: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Returns slope, interval, verdict, sizes and median seconds of one axis.

    The slope is a least-squares fit to the medians; the interval uses the residuals of all rounds.
    """
    medians = {size: median(values) for size, values in by_size.items()}
    upper = list(medians)[-max(3, (len(medians) + 1) // 2) :]
    x = [log(size) for size in upper]
    y = [log(max(medians[size], 1e-9)) for size in upper]
    spread = sum((a - fmean(x)) ** 2 for a in x)
    slope = sum((a - fmean(x)) * (b - fmean(y)) for a, b in zip(x, y, strict=True)) / spread
    line = {size: exp(fmean(y) + slope * (log(size) - fmean(x))) for size in upper}
    errors = [log(max(value, 1e-9) / line[size]) for size in upper for value in by_size[size]]
    free = len(errors) - 2
    repeats = len(errors) / len(upper)
    half = _T_QUANTILE[min(free, 10) - 1] * sqrt(sum(e * e for e in errors) / free / (spread * repeats))
    return {
        "slope": round(slope, 3),
        "interval": [round(slope - half, 3), round(slope + half, 3)],
        "is_linear": slope <= MOST,
        "fitted_to": upper,
        "seconds": {str(size): round(value, 5) for size, value in medians.items()},
    }


def _apart(by_size: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Returns the median seconds of attention that were subtracted, by size; {} if none were."""
    medians = {str(size): round(median(values), 5) for size, values in by_size.items()}
    return {"attention_seconds": medians} if any(medians.values()) else {}


# -- what is timed: each function returns (seconds, attention's seconds among them) by axis

Took = dict[str, tuple[float, float]]


def _batch(size: int) -> Took:
    return {"batch": (_seconds(_model(SMALL_MODEL), _prompts(size, 16), 16, max_batch=size), 0.0)}


def _prompt(size: int) -> Took:
    model = _model(SMALL_MODEL)
    return {"prompt": (_seconds(model, _prompts(1, size), 1), _attention_seconds(model, size, PREFILL_WIDTH))}


def _layers(size: int) -> Took:
    return {"layers": (_seconds(_model(replace(DEEP_MODEL, layers=size)), _prompts(4, 16), 8), 0.0)}


def _vocabulary(size: int) -> Took:
    model = _model(replace(SMALL_MODEL, vocab=size))
    return {"vocabulary": (_seconds(model, _prompts(4, 16), 8, capture="STCZ"), 0.0)}


def _tokens(size: int) -> Took:
    model, prompts = _model(TINY), _prompts(1, 8)
    took = _seconds(model, prompts, size, capture="STCZ")
    with _processor_seconds() as streamed:
        for _ in cp.stream(model, prompts, **_settings(8, size)):
            pass
    attention = _attention_seconds(model, size, 1)
    return {"tokens": (took, attention), "pieces": (streamed(), attention)}


def _requests(size: int) -> Took:
    model, settings = _model(TINY), _settings(6, 4)
    with _processor_seconds() as took:
        trace = cp.run(model, _prompts(size, 6), max_batch=16, capture="STCZ", progress=False, **settings)
    with _processor_seconds() as sampled:
        cp.run(model, _prompts(1, 6) * size, max_batch=16, capture="STCZ", progress=False, **settings)
    with _processor_seconds() as judged:
        trace.hypotheses()
    with tempfile.TemporaryDirectory() as folder, _processor_seconds() as saved:
        trace.save(folder, overwrite=True)
    with _processor_seconds() as read:
        for request in trace.requests:
            trace.states("S", 0, request.request_id)
            trace.logprobs(request.request_id)
    clocks = dict(requests=took, samples=sampled, hypotheses=judged, save=saved, each_request=read)
    return {axis: (seconds(), 0.0) for axis, seconds in clocks.items()}


JOBS: dict[str, Callable[[int], Took]] = {
    "batch": _batch, "prompt": _prompt, "layers": _layers, "vocabulary": _vocabulary, "tokens": _tokens,
    "requests": _requests,
}  # fmt: skip


def _seconds(
    model: CachedLM, prompts: list[list[int]], new_tokens: int, capture: str = "STC", **settings: Any
) -> float:
    """Returns the processor seconds of a run."""
    with _processor_seconds() as took:
        shapes = _settings(max(map(len, prompts)), new_tokens)
        cp.run(model, prompts, progress=False, capture=capture, **shapes, **settings)
    return took()


def _settings(prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Returns arguments of `cp.run` for requests that end by their length."""
    sampling = cp.SamplingParams(stop_token_ids=(), max_new_tokens=new_tokens)
    return dict(sampling=sampling, capacity=-(-(prompt_tokens + new_tokens + 64) // 64) * 64)


@contextmanager
def _processor_seconds() -> Iterator[Callable[[], float]]:
    """Yields a function that, after the `with`, returns the processor seconds of its body."""
    found: list[float] = []
    gc.collect()  # of what was timed before
    began = time.process_time()
    yield lambda: found[0]
    found.append(time.process_time() - began)


def _attention_seconds(model: CachedLM, length: int, width: int) -> float:
    """Returns the processor seconds of attention alone, over all layers, for `length` tokens in passes of `width`, each
    with its mask."""
    config: Any = model.config  # of Hugging Face
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    d_head = config.hidden_size // heads
    cache = model.new_cache(1, -(-length // 64) * 64)
    q, k = (torch.randn(1, n, width, d_head, dtype=model.dtype) for n in (heads, kv_heads))
    with _processor_seconds() as took, torch.inference_mode():
        for start in range(0, length, width):
            count = min(width, length - start)
            staged = StagedCache(cache, [0], [start], count, PassAttention(start + count))
            mask = staged.mask(model.dtype, model.device)
            new = k[:, :, :count]
            for layer in range(model.n_layers):
                attend_over_cache(staged, layer, q[:, :, :count], new, new, mask, d_head**-0.5)
    return took()


# -- models and prompts


@cache
def _model(size: Size) -> CachedLM:
    """Returns a random Llama of this size, with room for every prompt, behind our loader."""
    live = tiny_model("llama", size=size)
    live.config.max_position_embeddings = 8192
    return cp.load_model(live, progress=False)


def _prompts(number: int, length: int) -> list[list[int]]:
    """Returns prompts of random token ids: what a text says does not change what it costs."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(60, (number, length), generator=draw).tolist()
