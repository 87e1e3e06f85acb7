"""Reports the processor, its instruction set, threads, and the dtypes that it multiplies in hardware."""

import os
import platform
import time
from collections.abc import Callable
from statistics import median

import torch

from cacheprobe.cli.doctor.findings import Finding
from cacheprobe.core.config import RUN_DTYPES
from cacheprobe.models.settings import CPU_INFO, numeric_settings, processor_name
from cacheprobe.ops.compiled.operations import TORCH, choose

IN_HARDWARE = {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ("avx512_fp16", "amx_fp16")}
"""Flags of the processor, by dtype; any of them means that it multiplies matrices of that dtype in hardware."""
SAVES = 0.8
"""A 16-bit matrix product counts as computed in hardware if it takes less than this share of float32's time."""
_SHAPE = (128, 512)
_REPEATS = 5


def machine() -> list[Finding]:
    """Returns a list of findings on Python, processor, memory, instruction set, threads and GPU."""
    facts = numeric_settings()
    limits = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY")}
    limits_set = ", ".join(f"{name}={value}" for name, value in limits.items() if value)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = "there is one; a run uses it only with --device cuda" if torch.cuda.is_available() else "none; none is needed"
    return [
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("processor", processor_name()),
        Finding("memory", f"{_memory_gib():.1f} GiB"),
        Finding("instruction set", f"{facts['cpu_capability']}, as torch uses it"),
        Finding("threads", f"{facts['threads']} of {cores} cores" + (f"; {limits_set}" if limits_set else "")),
        Finding("GPU", gpu),
    ]


def operations() -> list[Finding]:
    """Returns a list of findings, one for each dtype of a run: what computes its matrix products and readings on the
    CPU, and why."""
    found = []
    for name in RUN_DTYPES:
        choice = choose(getattr(torch, name), torch.device("cpu"))
        by = choice.operations.text if choice.operations else TORCH
        found.append(Finding(name, f"{by}: {choice.reason}"))
    return found


def dtypes(seconds_of: "Callable[[str], float] | None" = None) -> list[Finding]:
    """Returns a list of findings, one for each dtype: how long a matrix product takes compared with float32, measured
    now, and the processor's flags for the dtype.

    seconds_of: function that returns the seconds of one product in a dtype.
    """
    seconds_of = seconds_of or product_seconds
    flags = set(CPU_INFO.read_text(encoding="utf-8").split()) if CPU_INFO.exists() else set()
    base = seconds_of("float32")
    findings = [Finding("float32", f"a product takes {1000 * base:.1f} ms")]
    for name in [name for name in RUN_DTYPES if name != "float32"]:
        ratio = seconds_of(name) / base
        where = "in hardware" if ratio < SAVES else "not in hardware"
        named = [flag for flag in IN_HARDWARE[name] if flag in flags]
        note = f"the processor names {', '.join(named)}" if named else f"no {' or '.join(IN_HARDWARE[name])} is named"
        findings.append(Finding(name, f"{where}: {ratio:.2f} of float32's time; {note}"))
    return findings


def product_seconds(dtype: str) -> float:
    """Returns the median seconds of five products of a 128 x 512 and a 512 x 512 matrix in `dtype`."""
    rows, width = _SHAPE
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, width, generator=generator).to(getattr(torch, dtype)) for n in (rows, width))
    taken = []
    with torch.inference_mode():
        for _ in range(_REPEATS + 1):
            began = time.perf_counter()
            torch.matmul(a, b)
            taken.append(time.perf_counter() - began)
    return median(taken[1:])  # the first one warms up


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
