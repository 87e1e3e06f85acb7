"""The contract of every kernel on a GPU, and how near each comes to what the device can do.

    python -m cacheprobe_kernels.checks.on_gpu [--json FILE]

Compiled code against references and float64, bits in another batch, then the time of each kernel at a model's sizes
beside the least that its bytes and its products could take. What the device can do is measured in the same process: a
copy for the bytes, a large product for the matrix rate. Exits 1 where a kernel breaks its contract, and 2 where there
is no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

from cacheprobe.core.files import write_whole
from cacheprobe.core.registry import available
from cacheprobe_kernels.base import INTERPRETED, Draws, Kernel
from cacheprobe_kernels.checks.contract import batch_complaints, full_complaints, reference_complaints

_COPIED_BYTES = 2**30
_PRODUCT = 8192
"""Numbers a side of the product whose rate stands for the device's."""

Clock = Callable[[Callable[[], object]], float]
"""Seconds of a call."""


@dataclass(frozen=True)
class Device:
    """What a device does at its best."""

    name: str
    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Timing:
    """One kernel at its full size."""

    kernel: str
    sizes: str
    microseconds: float
    reference_microseconds: float
    roof_microseconds: float
    """The longer of what its bytes take at the measured bandwidth and its products at the measured rate."""
    share_of_roof: float
    limited_by: str
    """bytes or products."""


def complaints(device: torch.device, say: Callable[[str], object] = print) -> list[str]:
    """Of every kernel and case, the full size too; `say` hears of each kernel."""
    found: list[str] = []
    for name, kernel in available("kernels").items():
        mine = [text for case in kernel.cases for text in reference_complaints(kernel, case, device)]
        mine += [text for case in kernel.cases for text in batch_complaints(kernel, case, device)]
        mine += full_complaints(kernel, device)
        say(f"{name}: {len(kernel.cases)} cases and the full size: {'; '.join(mine) or 'good'}")
        found += mine
    return found


def timed(kernel: type[Kernel], device: torch.device, best: Device, seconds_of: Clock) -> Timing:
    """A kernel and its reference at the full size, beside the roof."""
    arguments = kernel.inputs(kernel.full, Draws(device))
    num_bytes, num_flops = kernel.work(arguments)
    roofs = {"bytes": num_bytes / best.bytes_per_second, "products": num_flops / best.flops_per_second}
    limited_by = max(roofs, key=lambda name: roofs[name])
    seconds = seconds_of(lambda: kernel.run(**arguments))
    return Timing(
        kernel.name,
        " ".join(f"{name}={size}" for name, size in kernel.full.sizes.items()),
        1e6 * seconds,
        1e6 * seconds_of(lambda: kernel.reference(**arguments)),
        1e6 * roofs[limited_by],
        roofs[limited_by] / seconds,
        limited_by,
    )


def measured(device: torch.device, seconds_of: Clock) -> Device:
    """Bandwidth of a copy, reading and writing, and the rate of a product in bfloat16."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * _COPIED_BYTES / seconds_of(lambda: target.copy_(source))
    a, b = (torch.randn(_PRODUCT, _PRODUCT, device=device).bfloat16() for _ in range(2))
    rate = 2 * _PRODUCT**3 / seconds_of(lambda: a @ b)
    return Device(torch.cuda.get_device_name(device), bandwidth, rate)


def table(timings: list[Timing]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    yield "| kernel | sizes | us | reference us | roof us | share of roof | limited by |"
    yield "|---|---|---|---|---|---|---|"
    for t in timings:
        numbers = f"{t.microseconds:.1f} | {t.reference_microseconds:.1f} | {t.roof_microseconds:.1f}"
        yield f"| {t.kernel} | {t.sizes} | {numbers} | {t.share_of_roof:.2f} | {t.limited_by} |"


def seconds_of(call: Callable[[], object]) -> float:
    """Median, with a cold second-level cache each time."""
    return triton.testing.do_bench(call, return_mode="median") / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write what was measured to this file")
    given = parser.parse_args()
    if not torch.cuda.is_available() or INTERPRETED:
        print("there is no GPU" if not INTERPRETED else "TRITON_INTERPRET is set: nothing is compiled", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    found = complaints(device)
    best = measured(device, seconds_of)
    timings = [timed(kernel, device, best, seconds_of) for kernel in available("kernels").values()]
    print(
        f"{best.name}: {best.bytes_per_second / 1e9:.0f} GB/s, {best.flops_per_second / 1e12:.0f} TFLOP/s in bfloat16"
    )
    print("\n".join(table(timings)))
    if given.json:
        facts = {"device": asdict(best), "torch": torch.__version__, "triton": triton.__version__, "complaints": found,
                 "timings": [asdict(one) for one in timings]}  # fmt: skip
        write_whole(given.json, lambda path: path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
