"""Rollback of a recurrent state: the state kept after each token, beside two ways that compute accepted tokens again.

An OLMo Hybrid with random weights (three layers of Gated DeltaNet, one of attention) verifies windows of drafts, of
which half are accepted on average.
kept: ours. The state after each token stays, and a rollback takes an earlier one.
replayed: token by token, too. Only the state before the window stays; after a rejection the accepted tokens are fed
again from there.
chunked: transformers' own forward, a window at once, and a copy of its cache before each window; accepted tokens are
fed again. It is the fastest for a long window, but a token's bits depend on the window.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, OlmoHybridConfig, OlmoHybridForCausalLM

import cacheprobe as cp
from cacheprobe.kvcache.recurrent import LayerStates, RecurrentCache, RecurrentMemory
from cacheprobe_benchmarks.shared.machine import machine, measuring

SMALL = {"width": 32, "windows": (4,), "passes": 4}
Way = Callable[[Any, Sequence["Window"]], Tensor]
"""Function that feeds the windows, and returns the logits [n, v] of the last accepted token of each."""


class Window:
    """Holds the tokens of one window [1, w], its absolute position, and how many of them are accepted."""

    def __init__(self, token_ids: Tensor, start: int, accepted: int) -> None:
        self.token_ids, self.start, self.accepted = token_ids, start, accepted


class StateBefore(RecurrentMemory):
    """Keeps the states before a pass and those after its last token."""

    start = 0
    """First position of the pass."""

    def record(self, layer: int, row: int, position: int, states: LayerStates) -> None:
        """Stores the states after the token at `position`, without a copy: the next pass makes one."""
        kept = self._of_row[row][layer]
        before = {self.start - 1: kept[self.start - 1]} if self.start - 1 in kept else {}
        self._of_row[row][layer] = {**before, position: dict(states)}


def kept(model: Any, windows: Sequence[Window]) -> Tensor:
    """One forward a window; the state of the last accepted token is there."""
    cache, out = _cache(model, windows), []
    for one in windows:
        out.append(model.forward(one.token_ids, cache, [0], [one.start])[0, one.accepted - 1])
        cache.recurrent.drop(0, one.start + one.accepted)
    return torch.stack(out)


def replayed(model: Any, windows: Sequence[Window]) -> Tensor:
    """One forward a window, and one over its accepted tokens unless all are."""
    cache, out = _cache(model, windows), []
    cache.recurrent = StateBefore(1, cache.capacity, model.initial)
    for one in windows:
        cache.recurrent.start = one.start
        out.append(model.forward(one.token_ids, cache, [0], [one.start])[0, one.accepted - 1])
        if one.accepted < one.token_ids.shape[1]:
            cache.recurrent.drop(0, one.start)
            model.forward(one.token_ids[:, : one.accepted], cache, [0], [one.start], logit_slots=[0])
    return torch.stack(out)


@torch.inference_mode()
def chunked(model: Any, windows: Sequence[Window]) -> Tensor:
    """transformers' own forward over a window, and over its accepted tokens from a copy of the cache unless all are."""
    cache, out = DynamicCache(config=model.live.config), []
    for one in windows:
        before = copy.deepcopy(cache)
        out.append(model.live(one.token_ids, past_key_values=cache, use_cache=True).logits[0, one.accepted - 1])
        if one.accepted < one.token_ids.shape[1]:
            model.live(one.token_ids[:, : one.accepted], past_key_values=before, use_cache=True, logits_to_keep=1)
            cache = before
    return torch.stack(out)


WAYS: dict[str, Way] = {"kept": kept, "replayed": replayed, "chunked": chunked}


def run(rounds: int, *, width: int = 128, windows: Sequence[int] = (4, 16), passes: int = 12) -> dict[str, Any]:
    """By window: milliseconds of CPU time for each committed token; over_kept, the CPU time over that of the kept
    states, both medians over rounds; kilobytes of states that a cache row keeps; largest_difference of logits."""
    torch.set_num_threads(1)
    model = _model(width)
    per_state = model.new_cache(1, 8).recurrent.bytes_of_position
    told: dict[str, dict[str, Any]] = defaultdict(dict)
    with measuring((rounds + 1) * len(windows) * len(WAYS)) as bar:
        for window in windows:
            fed = list(_windows(window, passes))
            committed = sum(one.accepted for one in fed)
            seconds: dict[str, list[float]] = defaultdict(list)
            logits: dict[str, Tensor] = {}
            for number in range(rounds + 1):
                for name, way in WAYS.items():
                    began = time.process_time()
                    logits[name] = way(model, fed)
                    if number:  # the first calls allocate
                        seconds[name].append(time.process_time() - began)
                    bar.advance(note=f"{name}, window {window}")
            ratios = {
                name: [a / b for a, b in zip(took, seconds["kept"], strict=True)] for name, took in seconds.items()
            }
            states = {"kept": window + 1, "replayed": 2, "chunked": 2}
            told[f"window {window}"] = {
                "milliseconds_a_token": {name: round(1000 * median(x) / committed, 3) for name, x in seconds.items()},
                "over_kept": {name: round(median(ratio), 3) for name, ratio in ratios.items()},
                "kilobytes_a_row": {name: round(count * per_state / 1000, 1) for name, count in states.items()},
                "largest_difference": max(float((one - logits["kept"]).abs().max()) for one in logits.values()),
            }
    return {"benchmark": "recurrent-rollback", "rounds": rounds, "width": width, "passes": passes, **told, **machine()}


def _windows(width: int, count: int) -> Iterator[Window]:
    """Yields windows one after the other; the first of each is its pending token, so at least one is accepted."""
    draw, start = torch.Generator().manual_seed(width), 0
    for number in range(count):
        accepted = 1 + (number * 5) % width if number % 4 else width
        yield Window(torch.randint(0, 96, (1, width), generator=draw), start, accepted)
        start += accepted


def _cache(model: Any, windows: Sequence[Window]) -> RecurrentCache:
    cache = model.new_cache(1, windows[-1].start + windows[-1].token_ids.shape[1])
    cache.allocate()
    return cache


def _model(width: int) -> Any:
    torch.manual_seed(0)
    config = OlmoHybridConfig(
        vocab_size=96, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=512, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return cp.load_model(OlmoHybridForCausalLM(config).eval(), products="torch")
