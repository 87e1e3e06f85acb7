"""What a job's matrix products take by themselves, by the quickest of the ways that this project has."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from cacheprobe.models.fast.hooked_hf import HookedHF
from cacheprobe.ops.wide_product import widened

REPEATS = 5
Product = Callable[[Tensor, Tensor], Tensor]


def products_seconds(model: Any, blocks: Sequence[int], heads: Sequence[int]) -> float:
    """Seconds of a job that feeds the blocks, and the unembedding, passes of so many rows.

    model: a bridge; with compiled products they are tried too. Of every height the quickest way counts.
    """
    ways: list[Product] = [linear, widened]
    if model.compiled is not None:
        ways.append(model.compiled.product)
    plain = HookedHF(model).model
    head = plain.get_output_embeddings().weight
    inner = [m.weight for m in plain.modules() if type(m) is torch.nn.Linear and m.weight is not head]
    return sum(_quickest(ways, inner, rows) * blocks.count(rows) for rows in set(blocks)) + sum(
        _quickest(ways, [head], rows) * heads.count(rows) for rows in set(heads)
    )


@torch.inference_mode()
def _quickest(ways: Sequence[Product], weights: Sequence[Tensor], rows: int) -> float:
    """Medians, so that the quickest is not the luckiest."""
    values = {w.shape[1]: torch.randn(rows, w.shape[1]).to(w.dtype) for w in weights}
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(REPEATS):
        for way, seconds in zip(ways, taken, strict=True):
            began = time.perf_counter()
            for weight in weights:
                way(values[weight.shape[1]], weight)
            seconds.append(time.perf_counter() - began)
    return min(map(median, taken))
