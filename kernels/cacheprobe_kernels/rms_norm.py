"""RMSNorm, one program a row: a row's bits do not depend on the others."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.ops import references
from cacheprobe_kernels.base import (
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
    next_power_of_2,
    require_dense_rows,
    require_one_device,
    require_one_dtype,
    require_shape,
    size_in_bytes,
)
from cacheprobe_kernels.tiles import narrow, widen

_LARGEST_BLOCK = 2048


@triton.jit
def _rms_norm(values, weight, out, width, num_values, stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = widen(tl.load(values + row * stride + at, mask=at < width, other=0.0))
        squares += part * part
    mean = tl.math.div_rn(tl.sum(squares, 0), num_values)
    scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        part = tl.load(values + row * stride + at, mask=at < width, other=0.0)
        scaled = widen(narrow(widen(part) * scale, part.dtype))  # as models do: rounded before the weight comes
        by = widen(tl.load(weight + at, mask=at < width, other=0.0))
        tl.store(out + row * width + at, narrow(by * scaled, out.dtype.element_ty), mask=at < width)


@register("kernels", "rms_norm")
class RmsNorm(Kernel):
    """values [n m] by the root of their mean square, times weight [m].

    The mean is taken in float32, in blocks whose size is a function of m.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467), equation 4; batch invariance as in batch_invariant_ops of Thinking
    Machines Lab, 2025.  Twin: cacheprobe.ops.references.rms_norm, close, since sums are reordered.
    """

    name = "rms_norm"
    cases = (
        Case("ragged", torch.bfloat16, {"n": 5, "m": 48}),
        Case("one", torch.float32, {"n": 1, "m": 1}),
        Case("long", torch.float16, {"n": 3, "m": 2100}),
        Case("wide", torch.float32, {"n": 7, "m": 130}),
        Case("integers", torch.bfloat16, {"n": 4, "m": 64}, is_exact=True),
    )
    full = Case("smollm2-135m", torch.bfloat16, {"n": 240, "m": 576})
    because = "the squares are summed in blocks"

    @staticmethod
    def plan(values: Tensor, weight: Tensor, eps: float) -> Plan:
        require_dense_rows(values=values, weight=weight)
        require_one_dtype(values=values, weight=weight)
        require_shape("weight", weight, values.shape[1])
        require_one_device(values=values, weight=weight)
        (count, width), out = values.shape, torch.empty(values.shape, dtype=values.dtype, device=values.device)
        block = min(_LARGEST_BLOCK, next_power_of_2(width))
        tensors = {"values": values, "weight": weight, "out": out}
        numbers = {"width": width, "num_values": float(width), "stride": values.stride(0), "eps": eps}
        return Plan([Launch(_rms_norm, (count,), {**tensors, **numbers}, {"BLOCK": block})], out)

    reference = staticmethod(references.rms_norm)

    @staticmethod
    def exact(values: Tensor, weight: Tensor, eps: float) -> Outcome:
        wide = values.double()
        return {"out": weight.double() * wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()}

    @staticmethod
    def inputs(case: Case, draws: Draws) -> Arguments:
        n, m = case.sizes["n"], case.sizes["m"]
        if case.is_exact:
            values, weight = draws.integers(-9, 9, n, m, dtype=case.dtype), draws.normal(m, dtype=case.dtype)
            return {"values": values, "weight": weight, "eps": 0.0}
        return {
            "values": draws.normal(n, m, dtype=case.dtype),
            "weight": draws.normal(m, dtype=case.dtype),
            "eps": 1e-5,
        }

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return by_rows(arguments, ["values"], ["out"])

    @staticmethod
    def rtol(name: str, case: Case) -> float | None:
        return 0.0 if case.is_exact else {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}[case.dtype]

    @staticmethod
    def work(arguments: Arguments) -> Work:
        return Work(2 * size_in_bytes(arguments["values"]) + size_in_bytes(arguments["weight"]), 0)
