"""From how many rows on it pays to widen 16-bit weights: the products of SmolLM2's blocks, at one thread and at two.

Seconds of the widened products over those of the 16-bit ones, medians of ratios of neighbouring runs; below 1.0 it
pays. `wide_rows` is what is in force here, null for never.
"""

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from cacheprobe.ops import wide_product
from cacheprobe_benchmarks.shared.machine import machine, measuring

SHAPES = {(576, 576): 2, (192, 576): 2, (1536, 576): 2, (576, 1536): 1}
"""[outputs, inputs] of a block's products, and how many of them a block has."""
BLOCKS, ROWS, REPEATS = 30, (8, 16, 24, 32, 64, 96, 128, 192, 256, 480), 5

SMALL = {"num_blocks": 1, "heights": (8,), "repeats": 1}


def run(
    rounds: int, *, num_blocks: int = BLOCKS, heights: Sequence[int] = ROWS, repeats: int = REPEATS
) -> dict[str, Any]:
    """wide_over_narrow: by threads and rows, of one pass through all blocks; lower is better."""
    blocks = cycle(
        [
            [torch.randn(size).bfloat16() for size, count in SHAPES.items() for _ in range(count)]
            for _ in range(num_blocks)
        ]
    )
    found: dict[str, dict[str, float]] = {}
    with torch.inference_mode(), measuring(2 * len(heights)) as bar:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in heights:
                inputs = {width: torch.randn(rows, width).bfloat16() for _, width in SHAPES}
                narrow, wide = (
                    _pass(blocks, num_blocks, inputs, product) for product in (linear, wide_product.widened)
                )
                ratios = [wide() / narrow() for _ in range(rounds * repeats + 1)][1:]
                found.setdefault(f"{threads} threads", {})[f"{rows} rows"] = round(median(ratios), 2)
                bar.advance(note=f"{threads} threads, {rows} rows")
    return {
        "benchmark": "products",
        "rounds": rounds,
        "wide_rows": wide_product.wide_rows(torch.bfloat16, torch.device("cpu")),
        "wide_over_narrow": found,
        **machine(),
    }


def _pass(
    blocks: Any, num_blocks: int, inputs: dict[int, Tensor], product: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        for _ in range(num_blocks):
            for weight in next(blocks):
                product(inputs[weight.shape[1]], weight)
        return time.perf_counter() - began

    return timed
