"""Runs everything that needs a GPU, and writes one JSON file with the device's name.

    python -m cacheprobe_benchmarks.gpu.everything [--json FILE] [--rounds N]

Kernels against their references at real shapes; the loop against the CPU in float32; D1 with a verifier and without,
and with a planted fault; each kernel's bandwidth and arithmetic beside what the device can do; the main job of SmolLM2
and of random models of 1 and 8 billion weights. Exits 1 where a check complains, and 2 where there is no GPU.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cacheprobe.core.files import write_whole
from cacheprobe.core.registry import available
from cacheprobe.core.terminal import Progress
from cacheprobe.ops.kernel_set import choose_kernels
from cacheprobe_benchmarks.gpu.checks import determinism_complaints, loop_complaints
from cacheprobe_benchmarks.speed.products import Rates

RESULTS = Path(__file__).parents[2] / "results"


def reason_against() -> str:
    """Returns why nothing can be measured here; "" if it can."""
    if not torch.cuda.is_available():
        return "there is no GPU: torch.cuda.is_available() is False"
    chosen = choose_kernels(torch.bfloat16, "cuda")
    return "" if chosen.kernels else f"runs on this GPU do not use the kernels: {chosen.reason}"


def checked(device: str, kernels: Callable[[torch.device], list[str]], **small: Any) -> dict[str, list[str]]:
    """Returns complaints by check; an empty list is a pass. An error of a check is a complaint.

    kernels: the check of the kernels.  small: settings of the checks of the loop.
    """
    checks = {
        "kernels": lambda: kernels(torch.device(device)),
        "loop": lambda: loop_complaints(device, **small),
        "determinism": lambda: determinism_complaints(device, **small),
    }
    found: dict[str, list[str]] = {}
    with Progress(len(checks), "checking", "checks") as bar:
        for name, check in checks.items():
            try:
                found[name] = check()
            except Exception as error:  # the other checks still say something
                found[name] = [f"failed with {type(error).__name__}: {error!s:.300}"]
            bar.advance()
            bar.say(f"{name}: {'; '.join(found[name]) or 'good'}")
    return found


def measured(rounds: int) -> dict[str, Any]:
    """Returns the device's rates, each kernel's time beside its roof, and the jobs' ratios."""
    from cacheprobe_benchmarks.gpu.jobs import all_jobs
    from cacheprobe_kernels.checks import on_gpu

    device = torch.device("cuda")
    best = on_gpu.measured(device, on_gpu.seconds_of)
    timings = [on_gpu.timed(kernel, device, best, on_gpu.seconds_of) for kernel in available("kernels").values()]
    print("\n".join(on_gpu.table(timings)), flush=True)
    rates = Rates({"largest": {"torch": best.flops_per_second / 1e9}}, best.bytes_per_second / 1e9)
    return {"rates": asdict(best), "kernels": [asdict(one) for one in timings], "jobs": all_jobs("cuda", rates, rounds)}


def main(arguments: list[str] | None = None) -> int:
    """Runs all checks and measurements; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write; by default benchmarks/results/gpu-DEVICE.json")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of the jobs")
    given = parser.parse_args(arguments)
    if reason := reason_against():
        print(f"make gpu: {reason}; nothing was run or written", file=sys.stderr)
        return 2
    from cacheprobe_kernels.checks import on_gpu

    name = torch.cuda.get_device_name()
    complaints = checked("cuda", on_gpu.complaints)
    facts = {
        "benchmark": "gpu",
        "device": name,
        "rounds": given.rounds,
        "complaints": complaints,
        **measured(given.rounds),
        **{library: version(library) for library in ("torch", "triton", "transformers")},
    }
    path = given.json or RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"
    write_whole(path, lambda target: target.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8"))
    print(path)
    return int(any(complaints.values()))


if __name__ == "__main__":
    sys.exit(main())
