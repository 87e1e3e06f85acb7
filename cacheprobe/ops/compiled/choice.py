"""Chooses, for a dtype on this machine, between the compiled loops and torch's own operations, and says why."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from cacheprobe.ops.compiled.basics import COMPILER, FEATURES, find_thread_runner
from cacheprobe.ops.compiled.lanes import FLOATS, LANES, PAIRS, TILES
from cacheprobe.ops.compiled.product import CompiledProduct
from cacheprobe.ops.compiled.queue import Queue
from cacheprobe.ops.compiled.readout import CompiledReadout
from cacheprobe.ops.compiled.tiles import SIDE, refusal_of_tiles
from cacheprobe.ops.readout import Readout, read_logits

TORCH = "torch"
"""Text in the fingerprint if torch computes the products and readings."""

_RELATIVE = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative difference from float64 that the trial accepts: one rounding, and for float32 the sum's order."""


class CompiledOperations(NamedTuple):
    """Holds the operations of a CPU that run in compiled loops: matrix product, and reading of logits and states."""

    product: CompiledProduct
    readout: CompiledReadout

    def norm(self, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMSNorm of values [..., m] with weight [m], without gradients."""
        queue = Queue(self.product.kind, weight.dtype)
        out = queue.norm(values.contiguous(), weight.contiguous(), eps)
        queue.run()
        return out

    @property
    def text(self) -> str:
        """Text for the fingerprint: kind of product, width of a register, compiler and processor."""
        return f"{self.product!r}, blocks in loops, {LANES} lanes, {COMPILER}"


class LoopChoice(NamedTuple):
    """Holds the compiled operations for a dtype, or None if torch's are used, and the reason."""

    operations: CompiledOperations | None
    reason: str


@cache
def choose(dtype: torch.dtype, device: torch.device) -> LoopChoice:
    """Returns the LoopChoice for tensors of a dtype on a device. The first call for a dtype compiles the loops, or
    loads them from numba's cache, and compares them with torch in float64.

    Where the processor has matrix units for float16, and for float32 on Intel's processors, torch is faster.
    """
    kind, reason = _kind(dtype, device)
    if kind is None:
        return LoopChoice(None, reason)
    product = CompiledProduct(kind)
    operations = CompiledOperations(product, CompiledReadout(product))
    try:
        wrong = _product_error(product, dtype) or _row_error(operations, dtype)
        wrong = wrong or _readout_error(operations.readout, dtype)
    except Exception as error:  # numba and LLVM raise errors of many kinds
        wrong = f"{type(error).__name__}: {error!s:.200}"
    return (
        LoopChoice(None, f"the compiled loops failed their trial: {wrong}") if wrong else LoopChoice(operations, reason)
    )


def _kind(dtype: torch.dtype, device: torch.device) -> tuple[int | None, str]:
    """Returns (kind of innermost loop, None for torch; the reason)."""
    has = torch.cpu.get_capabilities()
    is_intel = str(has.get("cpu_name", "")).startswith("Intel")
    if device.type != "cpu" or dtype not in _RELATIVE:
        return None, f"{_name(dtype)} on {device.type} is computed by torch"
    if has.get("architecture") != "x86_64" or not (has.get("avx2") and has.get("fma3")):
        return None, "the processor is no x86-64 with AVX2"
    if not FEATURES >= {"+avx2", "+fma"}:
        return None, "numba compiles for a processor without AVX2 (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES)"
    if find_thread_runner() is None:
        return None, "this torch has no GNU OpenMP library, on whose threads the loops run"
    if dtype == torch.float16 and has.get("amx_fp16"):
        return None, "the processor has matrix units for float16, which torch uses"
    if dtype == torch.float32 and is_intel:
        return None, "MKL's float32 is faster on Intel's processors"
    if dtype == torch.bfloat16 and has.get("amx_bf16"):
        if not (FEATURES >= {"+amx-bf16", "+amx-tile"} and LANES == SIDE):
            return (
                None,
                "torch uses the matrix units, numba compiles without (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES)",
            )
        if not (refusal := refusal_of_tiles()):
            return TILES, "matrix units for bfloat16 (AMX)"
        return FLOATS, f"float32 arithmetic; the operating system refused this process the matrix units: {refusal}"
    if dtype == torch.bfloat16 and has.get("avx512_bf16") and "+avx512bf16" in FEATURES and not is_intel:
        return PAIRS, "dot products of bfloat16 (AVX512-BF16)"
    return FLOATS, "float32 arithmetic; the processor has nothing faster for this dtype"


def _product_error(product: CompiledProduct, dtype: torch.dtype) -> str | None:
    """Compares products of several shapes with float64, since compilers have bugs. Returns an error text, or None."""
    generator = torch.Generator().manual_seed(0)
    wide = 8 * 64 * torch.get_num_threads()  # panels of 64 outputs
    for rows, inner, width in ((1, 64, 16), (7, 100, 37), (300, 70, 130), (9, 70, wide)):
        values, weight, bias = (
            torch.randn(size, generator=generator).to(dtype) for size in ((rows, inner), (width, inner), (width,))
        )
        expected = linear(values.double(), weight.double(), bias.double())
        error = (product(values, weight, bias).double() - expected).abs()
        if not bool((error <= expected.abs() * _RELATIVE[dtype] + 1e-4).all()):
            return f"a product of {rows} rows of {inner} is {float(error.max()):.3g} away from float64's"
    return None


def _row_error(operations: CompiledOperations, dtype: torch.dtype) -> str | None:
    """Compares norms and gates with float64. Returns an error text, or None."""
    generator = torch.Generator().manual_seed(0)
    values, others, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((5, 70), (5, 70), (70,)))
    queue = Queue(operations.product.kind, dtype)
    gated = queue.gated(values, others)
    queue.run()
    wide = values.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    made = {"norm": operations.norm(values, weight, 1e-5), "gate": gated}
    for name, expected in (("norm", normed), ("gate", silu(wide) * others.double())):
        error = (made[name].double() - expected).abs()
        if not bool((error <= expected.abs() * 2 * _RELATIVE[dtype] + 1e-6).all()):
            return f"a {name} is {float(error.max()):.3g} away from float64's"
    return None


def _readout_error(readout: CompiledReadout, dtype: torch.dtype) -> str | None:
    """Compares readings with `read_logits`. Returns an error text, or None."""
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((9, 64), (1300, 64)))
    logits = readout.product(states, weight)
    targets = torch.tensor([-1, 0, 5, 511, 512, 600, 1299, 700, -1])
    expected = read_logits(logits, targets, 5)
    for made in (readout.of_logits(logits, targets, 5), readout.of_states(states, weight, None, targets, 5)):
        for name, here, there in zip(Readout._fields, made, expected, strict=True):
            if not torch.allclose(here.double(), there.double(), rtol=1e-5, atol=2e-5, equal_nan=True):
                return f"another {name} than torch's"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
