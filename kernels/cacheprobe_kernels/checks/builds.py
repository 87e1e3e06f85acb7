"""Kernels through Triton's compiler and ptxas without a GPU: what a launch of given sizes would be compiled to."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cacheprobe.core.registry import available
from cacheprobe_kernels.base import INTERPRETED, Draws, Kernel, Launch

ARCHITECTURES = (80, 90)
"""Compute capabilities, times ten: A100 and H100."""
DTYPES = (torch.bfloat16, torch.float32)
LIMITS = {"registers": 255, 80: 163 * 1024, 90: 227 * 1024}
"""Registers of a thread, and bytes of shared memory of a block by architecture.
Source: CUDA C++ Programming Guide, table of technical specifications by compute capability.
"""
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """One jitted function, compiled for one architecture."""

    kernel: str
    function: str
    dtype: str
    arch: int
    registers: int
    """Of each thread."""
    shared_bytes: int
    """Of each block."""
    spill_bytes: int
    """Stores and loads of registers that found no place, of each thread."""

    @property
    def complaint(self) -> str:
        """What keeps it from running well, or an empty text."""
        where = f"{self.kernel} {self.function} {self.dtype} sm_{self.arch}"
        if self.spill_bytes:
            return f"{where} spills {self.spill_bytes} bytes a thread"
        if self.shared_bytes > LIMITS[self.arch]:
            return f"{where} asks for {self.shared_bytes} bytes of shared memory, {LIMITS[self.arch]} are there"
        return ""


def builds(kernel: type[Kernel], architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[Build]:
    """Everything that a call at the kernel's full size launches, in each type, for each architecture.

    Raises: RuntimeError in the interpreter; whatever the compiler raises.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: nothing is compiled in the interpreter; unset it")
    for dtype in DTYPES if kernel.full.dtype.is_floating_point else (kernel.full.dtype,):
        arguments = kernel.inputs(replace(kernel.full, dtype=dtype), Draws(torch.device("meta")))
        for launch in kernel.plan(**arguments).launches:
            for arch in architectures:
                yield _build(kernel.name, launch, dtype, arch)


def all_builds(architectures: tuple[int, ...] = ARCHITECTURES) -> Iterator[Build]:
    """Of every registered kernel."""
    for kernel in available("kernels").values():
        yield from builds(kernel, architectures)


def schedule_complaints(kernel: type[Kernel]) -> list[str]:
    """Where one row would be compiled otherwise than many: Triton specialises on 1 and multiples of 16.

    Other instructions may be other bits, and then a row's would depend on the rest of its batch.
    """
    if not kernel.full.dtype.is_floating_point:
        return []  # it computes no number
    seen = []
    for rows in (1, 16, 17, 256):
        sizes = {**kernel.full.sizes, **{name: rows for name in ("n", "b", "t") if name in kernel.full.sizes}}
        case = replace(kernel.full, sizes=sizes)
        launches = kernel.plan(**kernel.inputs(case, Draws(torch.device("meta")))).launches
        seen.append([(one.function.__name__, one.num_warps, one.num_stages, _specialised(one)) for one in launches])
    first = seen[0]
    return [
        f"{kernel.name} {mine[0]} is compiled otherwise for {rows} rows than for 1: {_differing(mine[3], other[3])}"
        for rows, some in zip((16, 17, 256), seen[1:], strict=True)
        for other, mine in zip(first, some, strict=True)
        if mine != other
    ]


def _differing(mine: Any, other: Any) -> str:
    names = list(mine[0])
    places = {i for a, b in zip(mine[1:], other[1:], strict=True) for (i,) in {*a, *b} if a.get((i,)) != b.get((i,))}
    return ", ".join(names[i] for i in sorted(places)) or "its types"


def _build(name: str, launch: Launch, dtype: torch.dtype, arch: int) -> Build:
    signature, constants, attributes = _specialised(launch)
    source = ASTSource(launch.function, signature, constants, attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    said = _assembled(compiled.asm["ptx"], arch)
    spills = [int(count) for count in re.findall(r"(\d+) bytes spill", said)]
    registers = re.search(r"Used (\d+) registers", said)
    if registers is None or len(spills) != 2:
        raise RuntimeError(f"ptxas said nothing of registers and spills: {said!r}")
    return Build(
        name, launch.function.__name__.strip("_"), str(dtype).removeprefix("torch."), arch, int(registers.group(1)),
        compiled.metadata.shared, sum(spills),
    )  # fmt: skip


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], list]]:
    """Types, constants and divisibility of the arguments, as Triton's own launcher would find them."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    given = {**launch.arguments, **launch.constants}
    for i, parameter in enumerate(launch.function.params):
        value = given[parameter.name]
        is_fixed = parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        if is_fixed:
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        is_aligned = isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
        if is_aligned and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _type_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int) and -(2**31) <= value < 2**31:
        return "i32"
    raise TypeError(f"no kernel takes a {type(value).__name__}: {value!r:.40}")


def _assembled(ptx: str, arch: int) -> str:
    """What ptxas says of the code, with the flags that Triton gives it."""
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        command = [triton.knobs.nvidia.ptxas.path, "-v", "-lineinfo", "--regAllocOptLevel=2",
                   f"--gpu-name={target.group(1)}", str(path), "-o", str(path.with_suffix(".cubin"))]  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
