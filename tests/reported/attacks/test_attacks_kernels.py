"""Patching and flips in Triton kernels, here in Triton's interpreter, equal plain forwards with hooks."""

import copy
from functools import cache
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.registry import available
from cacheprobe_benchmarks.shared.tiny import Size, tiny_model
from tests.by_hand import changed, forward

SIZE = Size(vocab=40, hidden=16, mlp=24, layers=2, heads=4, initializer_range=0.3)
CLEAN, CORRUPT, ANSWER = [1, 3, 4, 5], [1, 9, 4, 6], (7, 8)


@cache
def in_kernels(family: str, window: int | None = None) -> Any:
    return cp.load_model(tiny_model(family, size=SIZE, window=window), products="kernels")


def modules_of(live: Any, site: str) -> list[Any]:
    """The modules whose outputs are S, T or C, layer by layer."""
    return [{"S": block, "T": block.self_attn, "C": block.mlp}[site] for block in live.model.layers]


def last_logits(live: Any, token_ids: list[int], site: str, layer: int, place: int, state: torch.Tensor) -> Any:
    """Logits of the last position of a forward in which the state at one place was replaced."""
    with changed(modules_of(live, site)[layer], lambda states: states[0, place].copy_(state)):
        return forward(live, token_ids)[0][-1]


def test_flips_in_kernels_are_forwards_with_hooks() -> None:
    live, model = tiny_model("llama", size=SIZE), in_kernels("llama")
    drafter = cp.drafters.Scripted(lambda state: [(state.token_ids[-1] + 1) % 40])
    settings: dict[str, Any] = dict(window=4, group=2, max_new_tokens=3, progress=False, capture=None)
    trace = cp.run(cp.load_model(copy.deepcopy(live)), [CLEAN], drafter=drafter, **settings)
    rejected = trace.rejected().iloc[0]
    settings = dict(model=model, sites="STC", edits=["zero"], progress=False)
    found = cp.analysis.flip(trace, 0, int(rejected.step), **settings)
    text = [*CLEAN, *trace.committed(0)][: found.meta["position"]]
    a, b = found.meta["drafted_token_id"], found.meta["committed_token_id"]
    for line in found.table.itertuples():
        nats = last_logits(live, text, line.site, line.layer, len(text) - 1, torch.zeros(16)).log_softmax(-1)
        assert line.difference_nats == pytest.approx(float(nats[a] - nats[b]), abs=2e-5), line


def test_kernels_refuse_rows_that_do_not_fit_their_queries_before_they_read_memory() -> None:
    kernels = available("kernels")
    q, cache = torch.randn(3, 4, 2, 8), torch.randn(5, 2, 16, 8)
    positions = torch.arange(6).view(3, 2)
    for rows, at in ((torch.tensor([0]), positions), (torch.tensor([0, 1, 2]), positions[:1])):
        with pytest.raises(ValueError, match="3 x 2 tokens need as many rows and positions"):
            kernels["cached_attention"].run(q, cache, cache, rows, at, 1.0)
    new, one = torch.randn(3, 2, 2, 8), torch.tensor([0])
    for rows, starts in ((one, torch.tensor([0, 1, 2])), (torch.tensor([0, 1, 2]), one)):
        with pytest.raises(ValueError, match="need as many values, rows and starts"):
            kernels["store_kv"].run(new, new, cache.clone(), cache.clone(), rows, starts)
