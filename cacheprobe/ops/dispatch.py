"""Runs operations that have a Triton kernel: with the kernel if possible, else with the reference function; reports
which one, and why.

The kernels' package is imported only when a call could use it; cacheprobe runs without triton. Runs on a GPU use these
operations (`ops.kernel_set`).
"""

import os
from collections.abc import Callable
from typing import Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from cacheprobe.core.registry import find
from cacheprobe.ops import readout, references

A = ParamSpec("A")
R = TypeVar("R", covariant=True)

CAPABILITIES = ((8, 0), (9, 0))
"""CUDA compute capabilities for which the kernels are compiled and inspected."""

KERNEL, REFERENCE = "kernel", "reference"


class Path(NamedTuple):
    """Holds which implementation of an operation runs on a device (`runs`: KERNEL or REFERENCE), and the reason."""

    runs: str
    """KERNEL or REFERENCE."""
    reason: str


class Operation(Generic[A, R]):
    """Runs a reference function or a kernel with the same arguments; the object is called like the function.

    The kernel is tested on a small case before its first use. If it fails to compile or differs from the reference,
    this process does not use it on that device. The chosen implementation raises the errors for bad arguments.
    """

    def __init__(self, name: str, reference: Callable[A, R]) -> None:
        self.name, self.reference = name, reference
        self._paths: dict[tuple[str, bool], Path] = {}

    def __repr__(self) -> str:
        return f"Operation({self.name})"

    def __call__(self, *args: A.args, **kwargs: A.kwargs) -> R:
        """Runs the operation on the device of its first tensor and returns its result."""
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if self.path(first.device).runs == REFERENCE:
            return self.reference(*args, **kwargs)
        return find("kernels", self.name).run(*args, **kwargs)

    def path(self, device: torch.device | str) -> Path:
        """Returns the Path (kernel or reference, and why) for tensors on this device. The first call for a device
        compiles and tests the kernel, if `reason_against` gives no reason."""
        device = torch.device(device)
        key = (str(device), uses_triton_interpreter())
        if key not in self._paths:
            self._paths[key] = self._choose(device)
        return self._paths[key]

    def _choose(self, device: torch.device) -> Path:
        if why_not := reason_against(device):
            return Path(REFERENCE, why_not)
        try:
            kernel = find("kernels", self.name)
        except ModuleNotFoundError as absent:
            return Path(REFERENCE, f"{absent.name} is not installed: pip install 'cacheprobe[kernels]'")
        try:
            differences = kernel.tried(device)
        except Exception as error:  # of a compiler, an assembler or a driver: each has its own
            last_line = (str(error).strip().splitlines() or [""])[-1]
            return Path(REFERENCE, f"the kernel fails on {device}: {type(error).__name__}: {last_line:.200}")
        if differences:
            return Path(REFERENCE, f"the kernel is not its reference on {device}: {differences[0]:.200}")
        return Path(KERNEL, "in Triton's interpreter" if device.type == "cpu" else f"compiled for {gpu_text(device)}")


def uses_triton_interpreter() -> bool:
    """Returns whether $TRITON_INTERPRET asks Triton to run kernels in its slow interpreter on the CPU, for tests. The
    variable must be set before triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")


def reason_against(device: torch.device) -> str:
    """Returns text: why the device, or the settings of torch and Triton, rule out kernels; "" if they do not. A kernel
    may still be absent or fail."""
    if device.type == "cpu" and uses_triton_interpreter():
        return ""
    if device.type == "cpu" and not torch.cuda.is_available():
        return "there is no GPU"
    if device.type != "cuda":
        return f"tensors are on {device.type}; kernels are compiled for CUDA"
    if torch.version.hip is not None:
        return "this torch is for ROCm; kernels are compiled for CUDA"
    if uses_triton_interpreter():
        return "TRITON_INTERPRET is set, so that nothing is compiled; unset it"
    if torch.cuda.get_device_capability(device) not in CAPABILITIES:
        known = " and ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        return f"{gpu_text(device)}; kernels are compiled and inspected for {known}"
    return ""


def gpu_text(device: torch.device) -> str:
    """Returns a GPU's name and compute capability, as text."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


rms_norm = Operation("rms_norm", references.rms_norm)
matmul = Operation("matmul", references.project)
cached_attention = Operation("cached_attention", references.cached_attention)
read_states = Operation("lens_topk", readout.read_states)
store_kv = Operation("store_kv", references.store_kv)
pack_rows = Operation("capture_pack", references.pack_rows)

OPERATIONS: tuple[Operation[..., object], ...] = (
    rms_norm, matmul, cached_attention, read_states, store_kv, pack_rows,
)  # fmt: skip


def paths(device: torch.device | str) -> dict[str, Path]:
    """Returns the Path (kernel or reference, and why) of each operation on a device, as a dict by name."""
    return {operation.name: operation.path(device) for operation in OPERATIONS}
