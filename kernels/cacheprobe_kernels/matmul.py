"""A matrix product in fixed tiles: a row's bits do not depend on how many rows there are, or which."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.ops import references
from cacheprobe_kernels.base import (
    INTERPRETED,
    Arguments,
    Case,
    Draws,
    Kernel,
    Launch,
    Outcome,
    Plan,
    Variant,
    Work,
    by_rows,
    require_dense_rows,
    require_one_device,
    require_one_dtype,
    require_shape,
    size_in_bytes,
)
from cacheprobe_kernels.tiles import narrow, tile_product, widen

BLOCK_N, BLOCK_O = (16, 16) if INTERPRETED else (64, 64)
"""Rows and outputs of a tile, for every number of rows: another shape may be another instruction, with other bits.
Smaller in the interpreter, where a small product is to have several.
"""


def block_width(dtype: torch.dtype) -> int:
    """Numbers of one step along a sum: 128 bytes on a GPU."""
    return 32 if INTERPRETED else 128 // dtype.itemsize


@triton.jit(do_not_specialize=["num_rows"])
def _matmul(
    values, weight, bias, out, num_rows, width, num_out, value_stride, weight_stride,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    outs = tl.program_id(1).to(tl.int64) * BLOCK_O + tl.arange(0, BLOCK_O)
    total = tile_product(
        values + rows * value_stride, rows < num_rows, weight + outs * weight_stride, outs < num_out, width,
        BLOCK_N, BLOCK_O, BLOCK_I,
    )  # fmt: skip
    if HAS_BIAS:
        total += widen(tl.load(bias + outs, mask=outs < num_out, other=0.0))[None, :]
    place = rows[:, None] * num_out + outs[None, :]
    inside = (rows < num_rows)[:, None] & (outs < num_out)[None, :]
    tl.store(out + place, narrow(total, out.dtype.element_ty), mask=inside)


@register("kernels", "matmul")
class Matmul(Kernel):
    """values [n i] times weight [o i] transposed, plus bias [o]: a linear layer without its choice of schedule.

    Sums are kept in float32 and rounded once. Tiles have one shape, there is no split along the sum, and nothing is
    compiled for a particular number of rows. float32 is multiplied as float32, without tensor cores.
    Source: batch_invariant_ops, Thinking Machines Lab, 2025.
    Twin: cacheprobe.ops.references.project, close, since sums are reordered.
    """

    name = "matmul"
    cases = (
        Case("ragged", torch.bfloat16, {"n": 5, "i": 70, "o": 19, "has_bias": 1}),
        Case("two-tiles", torch.float32, {"n": 18, "i": 33, "o": 10, "has_bias": 0}),
        Case("one", torch.float16, {"n": 1, "i": 1, "o": 1, "has_bias": 1}),
        Case("integers", torch.bfloat16, {"n": 9, "i": 80, "o": 20, "has_bias": 0}, is_exact=True),
    )
    full = Case("smollm2-135m-mlp", torch.bfloat16, {"n": 256, "i": 576, "o": 1536, "has_bias": 0})
    because = "sums are reordered"

    @staticmethod
    def plan(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Plan:
        require_dense_rows(values=values, weight=weight, bias=bias)
        require_one_dtype(values=values, weight=weight, bias=bias)
        (count, width), num_out = values.shape, weight.shape[0]
        require_shape("weight", weight, num_out, width)
        require_shape("bias", bias, num_out)
        require_one_device(values=values, weight=weight, bias=bias)
        out = torch.empty(count, num_out, dtype=values.dtype, device=values.device)
        tensors = {"values": values, "weight": weight, "bias": weight if bias is None else bias, "out": out}
        strides = {"value_stride": values.stride(0), "weight_stride": weight.stride(0)}
        numbers = {"num_rows": count, "width": width, "num_out": num_out, **strides}
        blocks = {"BLOCK_N": BLOCK_N, "BLOCK_O": BLOCK_O, "BLOCK_I": block_width(values.dtype)}
        grid = (triton.cdiv(count, BLOCK_N), triton.cdiv(num_out, BLOCK_O))
        constants = {"HAS_BIAS": bias is not None, **blocks}
        return Plan([Launch(_matmul, grid, {**tensors, **numbers}, constants, num_warps=4, num_stages=3)], out)

    reference = staticmethod(references.project)

    @staticmethod
    def exact(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Outcome:
        out = torch.einsum("ni,oi->no", values.double(), weight.double())
        return {"out": out if bias is None else out + bias.double()}

    @staticmethod
    def inputs(case: Case, draws: Draws) -> Arguments:
        n, i, o = (case.sizes[name] for name in "nio")
        shapes = {"values": (n, i), "weight": (o, i), **({"bias": (o,)} if case.sizes["has_bias"] else {})}
        if case.is_exact:
            return {name: draws.integers(-9, 10, *shape, dtype=case.dtype) for name, shape in shapes.items()}
        return {name: draws.normal(*shape, dtype=case.dtype) for name, shape in shapes.items()}

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return by_rows(arguments, ["values"], ["out"])

    @staticmethod
    def rtol(name: str, case: Case) -> float | None:
        return 0.0 if case.is_exact else {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[case.dtype]

    @staticmethod
    def work(arguments: Arguments) -> Work:
        values, weight = arguments["values"], arguments["weight"]
        (n, i), o = values.shape, weight.shape[0]
        return Work(size_in_bytes(values, weight) + n * o * values.element_size(), 2 * n * i * o)
