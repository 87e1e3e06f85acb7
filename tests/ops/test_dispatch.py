"""Which implementation of an operation runs, why, and that it is that one."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from cacheprobe.cli import doctor as section
from cacheprobe.ops import dispatch
from cacheprobe.ops.dispatch import KERNEL, OPERATIONS, REFERENCE, Operation, Path
from cacheprobe.ops.equality import bitwise
from cacheprobe.ops.references import project, rms_norm
from cacheprobe_kernels.matmul import Matmul

CUDA = torch.device("cuda")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As it is where TRITON_INTERPRET is not set."""
    monkeypatch.setattr(dispatch, "uses_triton_interpreter", lambda: False)
    return monkeypatch


@pytest.fixture
def gpu(compiled: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As it is where torch speaks of an H100."""
    compiled.setattr(torch.cuda, "is_available", lambda: True)
    compiled.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    compiled.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    return compiled


def fresh(name: str = "matmul", reference: Any = project) -> Operation:
    return Operation(name, reference)


def test_without_a_gpu_the_reference_runs(compiled: pytest.MonkeyPatch) -> None:
    compiled.setattr(torch.cuda, "is_available", lambda: False)
    assert fresh().path("cpu") == Path(REFERENCE, "there is no GPU")
    compiled.setattr(Matmul, "plan", None)
    a, b = torch.randn(3, 4), torch.randn(5, 4)
    assert bitwise(fresh()(a, b), project(a, b))


def test_tensors_elsewhere_are_for_the_reference(gpu: pytest.MonkeyPatch) -> None:
    assert fresh().path("cpu") == Path(REFERENCE, "tensors are on cpu; kernels are compiled for CUDA")
    assert "tensors are on meta" in fresh().path("meta").reason
    gpu.setattr(torch.version, "hip", "6.2")
    assert "ROCm" in fresh().path(CUDA).reason


def test_another_compute_capability_is_named(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    path = fresh().path(CUDA)
    assert path.runs == REFERENCE
    assert path.reason == "NVIDIA H100, compute capability 8.6; kernels are compiled and inspected for 8.0 and 9.0"


def test_a_kernel_that_does_not_compile_is_not_used(gpu: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> list[str]:
        raise RuntimeError("PTXAS error\nptxas fatal: out of registers")

    gpu.setattr(Matmul, "tried", fails)
    assert fresh().path(CUDA) == Path(
        REFERENCE, "the kernel fails on cuda: RuntimeError: ptxas fatal: out of registers"
    )


def test_a_kernel_that_is_not_its_reference_is_not_used(gpu: pytest.MonkeyPatch) -> None:
    """One trial on a device, however often it is asked."""
    asked = []
    gpu.setattr(Matmul, "tried", lambda device: [asked.append(device), "out is wrong"][1:])
    operation = fresh()
    for _ in range(2):
        assert operation.path(CUDA) == Path(REFERENCE, "the kernel is not its reference on cuda: out is wrong")
    assert len(asked) == 1
    gpu.setattr(Matmul, "tried", lambda device: [])
    assert fresh().path(CUDA) == Path(KERNEL, "compiled for NVIDIA H100, compute capability 9.0")


def test_a_missing_package_is_named(gpu: pytest.MonkeyPatch) -> None:
    def absent(kind: str, name: str) -> Any:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    gpu.setattr(dispatch, "find", absent)
    assert fresh().path(CUDA) == Path(REFERENCE, "triton is not installed: pip install 'cacheprobe[kernels]'")


def test_without_triton_everything_runs() -> None:
    """In a process where it cannot be imported: the operations, the doctor's section, and the registry's own word."""
    program = """
import sys
sys.modules["triton"] = None
import torch
from cacheprobe.cli.doctor import kernels
from cacheprobe.ops.dispatch import rms_norm
from cacheprobe.core.registry import available
torch.cuda.is_available = lambda: False
print(rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).sum().item(), kernels()[0].result)
try:
    available("kernels")
except ModuleNotFoundError as absent:
    print(absent.name)
"""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "8.0 use none; torch or compiled loops compute instead (there is no GPU)", "triton",
    ]  # fmt: skip


def test_in_the_interpreter_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, launched = fresh("rms_norm", rms_norm), []
    kernel = dispatch.find("kernels", "rms_norm")
    right = kernel.plan
    monkeypatch.setattr(kernel, "plan", staticmethod(lambda *a, **k: launched.append(1) or right(*a, **k)))
    out = operation(torch.full((2, 4), 3.0), torch.ones(4), 0.0)
    assert operation.path("cpu") == Path(KERNEL, "in Triton's interpreter")
    assert len(launched) == 2 and bitwise(out, torch.ones(2, 4))  # a trial, and the call


def test_the_doctor_says_which_and_why(gpu: pytest.MonkeyPatch) -> None:
    """Runs use all kernels, or leave out those that fail, or use none."""
    told = {operation.name: Path(KERNEL, "compiled for NVIDIA H100") for operation in OPERATIONS}
    gpu.setattr(dispatch, "paths", lambda device: told)
    (runs,) = section.kernels()
    assert runs.result.startswith("on cuda use all; Triton ")
    told["matmul"] = Path(REFERENCE, "the kernel fails")
    (runs,) = section.kernels()
    assert runs.result.startswith("on cuda use all but matmul: the kernel fails; Triton ")
    told.update(dict.fromkeys(told, Path(REFERENCE, "the kernel fails")))
    (runs,) = section.kernels()
    assert runs.result == "use none; torch or compiled loops compute instead (the kernel fails)"


def test_without_a_gpu_the_doctor_says_that_no_run_uses_a_kernel(compiled: pytest.MonkeyPatch) -> None:
    assert [f.result for f in section.kernels()] == [
        "use none; torch or compiled loops compute instead (there is no GPU)"
    ]
    compiled.setattr(dispatch, "uses_triton_interpreter", lambda: True)
    (runs,) = section.kernels()
    assert runs.result.startswith('use all with products="kernels", else none; Triton ')
