"""Where a number was measured."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from cacheprobe.core.progress import Progress


def say(what: str, seconds: float) -> None:
    """One line for each run, on stderr: benchmarks take minutes."""
    print(f"{what}: {seconds:.1f} s", file=sys.stderr, flush=True)


def measuring(num_runs: int) -> Progress:
    """The bar of a benchmark: runs that are timed or warm up, one after another."""
    return Progress(num_runs, "measuring", "runs")


def machine() -> dict[str, str | int]:
    """Processor, cores and the versions that a timing depends on."""
    cpu_info = Path("/proc/cpuinfo")
    names = [line for line in cpu_info.read_text().splitlines() if "model name" in line] if cpu_info.exists() else []
    return {
        "cpu": names[0].split(":")[1].strip() if names else platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_in_hardware": bool(names) and "avx512_bf16" in cpu_info.read_text(),
        "threads": torch.get_num_threads(),
        # threads that sleep between two products are late for small ones, by as long as these take
        "threads_wait": os.environ.get("OMP_WAIT_POLICY", "default"),
        **{name: version(name) for name in ("torch", "transformers", "transformer-lens")},
    }
