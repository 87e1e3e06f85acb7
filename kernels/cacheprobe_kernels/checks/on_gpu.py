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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton

from cacheprobe.core.files import write_whole
from cacheprobe.core.registry import available
from cacheprobe_kernels.base import INTERPRETED, Case, Draws, Kernel
from cacheprobe_kernels.checks.contract import batch_complaints, full_complaints, reference_complaints

_COPIED_BYTES = 2**30
_PRODUCT = 8192
"""Numbers a side of the product whose rate stands for the device's."""

WIDE = {
    "cached_attention": {"g": 8, "groups": 4, "dk": 128, "dv": 128},
    "capture_pack": {"m": 4096},
    "lens_topk": {"n": 512, "m": 4096, "v": 128_256},
    "matmul": {"n": 16, "i": 4096, "o": 14_336},
    "rms_norm": {"m": 4096},
    "store_kv": {"b": 16, "g": 8, "dk": 128, "dv": 128},
}
"""Sizes that a kernel has in a decode or verify pass of Llama 3.1 8B, where they are not those of `full`."""

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
    """One kernel at the size of a model."""

    kernel: str
    case: str
    sizes: str
    microseconds: float
    reference_microseconds: float
    roof_microseconds: float
    """The longer of what its bytes take at the measured bandwidth and its products at the measured rate."""
    share_of_roof: float
    limited_by: str
    """bytes or products."""


def large_cases(kernel: type[Kernel]) -> list[Case]:
    """Returns the cases of a kernel at the sizes of SmolLM2 and of an 8B model."""
    wide = {**kernel.full.sizes, **WIDE[kernel.name]}
    return [kernel.full, replace(kernel.full, name="llama-8b", sizes=wide)]


def kernel_complaints(
    kernel: type[Kernel], device: torch.device, small: Sequence[Case], large: Sequence[Case]
) -> list[str]:
    """Of one kernel, in small cases and at the sizes of models."""
    found = [text for case in small for text in reference_complaints(kernel, case, device)]
    found += [text for case in small for text in batch_complaints(kernel, case, device)]
    return found + [text for case in large for text in full_complaints(kernel, device, case)]


def complaints(device: torch.device, say: Callable[[str], object] = print) -> list[str]:
    """Of every kernel and case, the full size too; `say` hears of each kernel."""
    found: list[str] = []
    for name, kernel in available("kernels").items():
        mine = kernel_complaints(kernel, device, kernel.cases, [kernel.full])
        say(f"{name}: {len(kernel.cases)} cases and the full size: {'; '.join(mine) or 'good'}")
        found += mine
    return found


def timed(kernel: type[Kernel], case: Case, device: torch.device, best: Device, seconds_of: Clock) -> Timing:
    """A kernel and its reference in a case, beside the roof."""
    arguments = kernel.inputs(case, Draws(device))
    num_bytes, num_flops = kernel.work(arguments)
    roofs = {"bytes": num_bytes / best.bytes_per_second, "products": num_flops / best.flops_per_second}
    limited_by = max(roofs, key=lambda name: roofs[name])
    seconds = seconds_of(lambda: kernel.run(**arguments))
    return Timing(
        kernel.name,
        case.name,
        " ".join(f"{name}={size}" for name, size in case.sizes.items()),
        1e6 * seconds,
        1e6 * seconds_of(lambda: kernel.reference(**arguments)),
        1e6 * roofs[limited_by],
        roofs[limited_by] / seconds,
        limited_by,
    )


def measured(
    device: torch.device, seconds_of: Clock, copied_bytes: int = _COPIED_BYTES, side: int = _PRODUCT
) -> Device:
    """Bandwidth of a copy, reading and writing, and the rate of a square product in bfloat16."""
    source = torch.empty(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * copied_bytes / seconds_of(lambda: target.copy_(source))
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    rate = 2 * side**3 / seconds_of(lambda: a @ b)
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
    timings = [timed(kernel, kernel.full, device, best, seconds_of) for kernel in available("kernels").values()]
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
