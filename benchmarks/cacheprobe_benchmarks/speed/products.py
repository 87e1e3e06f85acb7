"""How fast matrix products and copies run on this machine: torch's and the compiled loops', by shape and dtype.

Ways alternate in one process; a rate is of the median time. The best rate of any shape and way, and the rate of a copy
that no cache holds, are the roofline of `bench main-job`, which measures them in its own run.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from cacheprobe.ops.compiled.operations import choose
from cacheprobe_benchmarks.shared.machine import machine, measuring

SHAPES = (
    (1, 576, 1536), (16, 576, 1536), (16, 1536, 576), (64, 576, 1536), (640, 576, 1536), (1, 576, 49152),
    (16, 576, 49152), (480, 576, 49152), (2048, 2048, 2048),
)  # fmt: skip
"""Rows, inner width and outputs: those of SmolLM2 in a decode, a verify pass, a prefill and the reading of Z, and one
large product."""
DTYPES = ("bfloat16", "float32")
COPIED_BYTES, REPEATS = 2**28, 5
SMALL: dict[str, Any] = {"shapes": ((2, 64, 64),), "copied_bytes": 2**20, "repeats": 1}


class Rates(NamedTuple):
    """Holds the rates of a machine."""

    gflops: dict[str, dict[str, float]]
    """By shape and way, billions of operations per second; a multiplication and its addition are two."""
    copy_gb_per_second: float
    """Bytes read and written, in billions."""

    @property
    def best_gflops(self) -> float:
        """The best rate of any product."""
        return max(rate for ways in self.gflops.values() for rate in ways.values())


def run(
    rounds: int, *, shapes: Any = SHAPES, copied_bytes: int = COPIED_BYTES, repeats: int = REPEATS
) -> dict[str, Any]:
    """gflops: by shape and way; higher is better."""
    torch.set_num_threads(2)
    found = rates(rounds * repeats, shapes, copied_bytes)
    return {
        "benchmark": "products",
        "rounds": rounds,
        "gflops": {shape: {way: round(rate, 1) for way, rate in ways.items()} for shape, ways in found.gflops.items()},
        "best_gflops": round(found.best_gflops, 1),
        "copy_gb_per_second": round(found.copy_gb_per_second, 2),
        **machine(),
    }


@torch.inference_mode()
def rates(repeats: int, shapes: Any = SHAPES, copied_bytes: int = COPIED_BYTES) -> Rates:
    """Measures the Rates of this machine: of every way in every shape, and of a copy of so many bytes."""
    gflops: dict[str, dict[str, float]] = {}
    with measuring(len(shapes) + 1) as bar:
        for rows, inner, outputs in shapes:
            ways: dict[str, Callable[[], object]] = {}
            for dtype in DTYPES:
                values, weight = (torch.randn(n, inner).to(getattr(torch, dtype)) for n in (rows, outputs))
                for name, product in _products(values.dtype).items():
                    ways[f"{name} {dtype}"] = lambda p=product, v=values, w=weight: p(v, w)
            taken = seconds_of(ways, repeats)
            gflops[f"{rows} x {inner} x {outputs}"] = {
                way: 2e-9 * rows * inner * outputs / seconds for way, seconds in taken.items()
            }
            bar.advance(note=f"{rows} x {inner} x {outputs}")
        source = torch.ones(copied_bytes // 4)
        target = torch.empty_like(source)
        copy = seconds_of({"copy": lambda: target.copy_(source)}, repeats)["copy"]
        bar.advance(note="copy")
    return Rates(gflops, 2e-9 * copied_bytes / copy)


def _products(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Returns the ways of a product in a dtype: torch's, and the compiled loops' where they are used."""
    operations = choose(dtype, torch.device("cpu")).operations
    return {"torch": linear, **({"loops": operations.product} if operations else {})}


def seconds_of(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median seconds of each way. The ways run in turn; the first round is not timed."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if number:
                taken[name].append(time.perf_counter() - began)
    return {name: median(seconds) for name, seconds in taken.items()}
