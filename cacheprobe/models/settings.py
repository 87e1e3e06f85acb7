"""Reads the process settings that may change the bits of a result, computes in plain settings, and lets one thread
compute at a time."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from threading import RLock, local

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cacheprobe.core.live import LiveModule, require_usable_process
from cacheprobe.models.base import CachedLM, ModelError

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
    backends: LiveModule = torch.backends  # its stubs lack the precision of a backend's products
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


class FunctionMode(TorchFunctionMode):
    """Calls `call(func, args, kwargs)` in place of every torch function `func` inside its `with`."""

    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.call = call

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return self.call(func, args, kwargs or {})


def keeping_float64(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Returns a context manager. Inside its `with`, torch calls on a float64 tensor that name float32
    (`.to(torch.float32)`, `.float()`, `dtype=torch.float32`) keep float64; `.to(other_tensor)` still converts. Does
    nothing if `dtype` is not float64."""
    return FunctionMode(_in_float64) if dtype == torch.float64 else nullcontext()


def _in_float64(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    named = dict(kwargs)
    if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
        if func is Tensor.float:
            return args[0]
        args = [torch.float64 if one is torch.float32 else one for one in args]
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
    return func(*args, **named)


class _ModelLock:
    """Locks the computation of all models for one thread, which may enter again."""

    def __init__(self) -> None:
        self._lock, self._of_thread = RLock(), _Depth()

    def __enter__(self) -> None:
        if not self._of_thread.depth:  # inside, the process is the same
            require_usable_process(is_computing=True)
        self._lock.acquire()
        self._of_thread.depth += 1

    def __exit__(self, *exc: object) -> None:
        self._of_thread.depth -= 1
        self._lock.release()


class _Depth(local):
    """Holds how often the current thread has entered the lock."""

    depth = 0


model_lock = _ModelLock()
"""Lock that a thread takes while a model computes or has our hooks on it. One lock for all models: torch's default
dtype and environment variables belong to the process, and two runs that draft for each other cannot deadlock."""

os.register_at_fork(
    after_in_child=model_lock.__init__
)  # a lock that another thread of the parent had taken stays taken

_in_step: set[int] = set()
"""Ids of the live models whose run is in the middle of a step. Read and written only by the holder of `model_lock`."""


def live_model(model: object) -> LiveModule:
    """Returns the module that owns a model's weights: the transformers model of a model around one, the ThinkingModel
    of a ThinkingLM. A plain module is returned unchanged."""
    model = getattr(model, "plain", None) or model  # a bridge is around a copy that shares the weights
    return getattr(model, "live", model)


def require_idle(model: CachedLM) -> None:
    """Checks that no run of `model` is in the middle of a step in this thread. Waits until no other thread computes.
    Raises: ModelError if a step is unfinished, which means that a hook, a lens or a drafter started a run of its
    own."""
    with model_lock:
        if id(live_model(model)) in _in_step:
            raise ModelError(
                f"{model.name} is in the middle of a step of another run: a hook, a lens or a drafter started a run of "
                "its own; start it after the step, or load a second model"
            )


@contextmanager
def hold_model(model: CachedLM) -> Iterator[None]:
    """Locks the computation of all models for this thread inside the `with`: other threads wait. Autocast is off and
    float32 is the default dtype.

    Raises: ModelError inside a step of another run of the same model.
    """
    with model_lock:
        require_idle(model)
        key = id(live_model(model))
        _in_step.add(key)
        try:
            with plain_settings():
                yield
        finally:
            _in_step.discard(key)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Decorates a function, as @one_at_a_time(): the function waits until no other thread computes, then runs with
    autocast off and float32 as the default dtype."""
    with model_lock, plain_settings():
        yield
