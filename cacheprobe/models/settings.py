"""Reads the process settings that may change the bits of a result, and switches autocast off while a model computes."""

import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from cacheprobe.core.live import ModelError, require_usable_process

CPU_INFO = Path("/proc/cpuinfo")

_PRECISIONS = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
"""Maps the precision names of `torch.backends` to those of `torch.set_float32_matmul_precision`."""
_VARIABLES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE")
"""Environment variables by which the matrix-product libraries choose their code."""
_LEAST = 5e-324
"""The smallest float64 above zero: a thread that flushes denormal numbers reads it as zero."""
_GRAIN = 32768
"""The smallest number of elements that torch gives to one thread."""


def numeric_settings() -> dict[str, str | int | float]:
    """Returns a dictionary of the library versions, threads and settings of this process that may change the bits of a
    result of any model.

    Cheap, since the engine calls this function before every step. The keys are those of the fingerprint, which error
    messages name.
    """
    backends: Any = torch.backends  # its stubs lack the precision of a backend's products
    precision = str(backends.mkldnn.matmul.fp32_precision)
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": backends.mkldnn.is_available() and bool(backends.mkldnn.enabled),
        **{name.lower(): os.environ.get(name, "") for name in _VARIABLES},
        "float32_matmul_precision": _PRECISIONS.get(precision, precision),
        "deterministic_algorithms": _deterministic_algorithms(),
        "flush_denormal": _flushes(_LEAST, 1.0),
        "attention_kernels": _attention_kernels(),
        **(_cuda_settings() if torch.cuda.is_available() else {}),
    }


def processor_name() -> str:
    """Returns the processor's name from /proc/cpuinfo, or else from Python's platform module; "unknown" if neither
    names it."""
    info = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype with the precision of the factors of a matrix product in `dtype`: `dtype` itself, except for
    float32 if `torch.set_float32_matmul_precision` allows less: then bfloat16, or float16 to stand for TF32."""
    precision = numeric_settings()["float32_matmul_precision"] if dtype == torch.float32 else "highest"
    return {"medium": torch.bfloat16, "high": torch.float16}.get(str(precision), dtype)  # TF32 has float16's digits


def _deterministic_algorithms() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn only" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _flushes(least: float, one: float) -> bool:
    """Returns True if the calling thread flushes denormal numbers, so that least * one is zero."""
    return least * one == 0.0


def _attention_kernels() -> str:
    """Returns the enabled attention kernels of torch as text: "all", "none", or their names joined by commas."""
    backend = torch.backends.cuda
    enabled = {
        "flash": backend.flash_sdp_enabled(),
        "memory-efficient": backend.mem_efficient_sdp_enabled(),
        "math": backend.math_sdp_enabled(),
        "cudnn": backend.cudnn_sdp_enabled(),
    }
    return "all" if all(enabled.values()) else ", ".join(name for name, is_on in enabled.items() if is_on) or "none"


def _cuda_settings() -> dict[str, str | int | float]:
    matmul = torch.backends.cuda.matmul
    precision = str(matmul.fp32_precision)
    return {
        "cuda_float32_matmul_precision": _PRECISIONS.get(precision, precision),
        "cuda_reduced_sums": f"float16 {matmul.allow_fp16_reduced_precision_reduction}, "
        f"bfloat16 {matmul.allow_bf16_reduced_precision_reduction}",
    }


def require_one_flush_mode() -> None:
    """Checks that either the calling thread and all of torch's threads flush denormal numbers, or none does. Raises:
    ModelError otherwise, because results would depend on the thread that computes a row."""
    least = torch.full((_GRAIN * torch.get_num_threads(),), _LEAST, dtype=torch.float64)
    flushed = int((least * 1.0 == 0).sum())
    if 0 < flushed < len(least) or (flushed > 0) != _flushes(_LEAST, 1.0):
        raise ModelError(
            "torch.set_flush_denormal(True) holds in some threads of this process and not in others, so bits "
            "would depend on the thread; call torch.set_flush_denormal(False), or set it to True before torch computes"
        )


def plain_settings() -> AbstractContextManager[object]:
    """Returns a context manager that switches autocast off and makes float32 the default dtype inside its `with`, and
    restores both settings afterwards."""
    cast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not cast and torch.get_default_dtype() == torch.float32:
        return nullcontext()
    return _plain(cast)


@contextmanager
def _plain(cast: list[str]) -> Iterator[None]:
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float32)
        for kind in cast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def in_plain_settings() -> Iterator[None]:
    """Decorates a function, as @in_plain_settings(): the function runs with autocast off and float32 as the default
    dtype. Raises: ModelError as `require_usable_process`."""
    require_usable_process()
    with plain_settings():
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts all modules of `model` into eval mode (no dropout) inside the `with`; restores their modes afterwards."""
    trained = [module for module in model.modules() if module.training]
    try:
        for module in trained:
            module.training = False
        yield
    finally:
        for module in trained:
            module.training = True
