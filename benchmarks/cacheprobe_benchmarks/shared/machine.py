"""Where a number was measured."""

import os
import sys
from importlib.metadata import version

import torch

from cacheprobe.core.terminal import Progress
from cacheprobe.models.settings import CPU_INFO, processor_name


def say(what: str, seconds: float) -> None:
    """One line for each run, on stderr: benchmarks take minutes."""
    print(f"{what}: {seconds:.1f} s", file=sys.stderr, flush=True)


def measuring(num_runs: int) -> Progress:
    """The bar of a benchmark: runs that are timed or warm up, one after another."""
    return Progress(num_runs, "measuring", "runs")


def machine() -> dict[str, str | int]:
    """Processor, cores and the versions that a timing depends on."""
    return {
        "cpu": processor_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_in_hardware": CPU_INFO.exists() and "avx512_bf16" in CPU_INFO.read_text(),
        "threads": torch.get_num_threads(),
        # threads that sleep between two products are late for small ones, by as long as these take
        "threads_wait": os.environ.get("OMP_WAIT_POLICY", "default"),
        **{name: version(name) for name in ("torch", "transformers", "transformer-lens")},
    }
