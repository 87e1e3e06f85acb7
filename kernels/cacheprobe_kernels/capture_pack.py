"""Rows of a pass gathered into a block of bfloat16, or of int8 with a scale for each row."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.ops import packing
from cacheprobe.ops.packing import KINDS, Packed
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
)
from cacheprobe_kernels.tiles import narrow, widen

_LARGEST_BLOCK = 2048
_LARGEST = tl.constexpr(float(packing.LARGEST))
_TO_EVEN = tl.constexpr(12582912.0)
"""1.5 * 2**23: a smaller float32 added to it and taken away again is rounded to a whole number, ties to even."""


@triton.jit(do_not_specialize=["num_slots", "num_states"])
def _capture_pack(
    states, rows, values, scales, num_states, num_slots, width, batch_stride, slot_stride, column_stride,
    IS_INT8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(rows + tl.program_id(0))
    is_row = (row >= 0) & (row < num_states)
    at = states + (row // num_slots) * batch_stride + (row % num_slots) * slot_stride
    out = values + tl.program_id(0).to(tl.int64) * width
    scale, divisor, is_finite = 1.0, 1.0, True
    if IS_INT8:
        largest = tl.zeros([BLOCK], tl.float32)
        strange = tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = is_row & (column < width)
            part = tl.abs(widen(tl.load(at + column.to(tl.int64) * column_stride, mask=inside, other=0.0)))
            ends = part < float("inf")
            strange |= tl.where(ends, 0, 1)
            largest = tl.maximum(largest, tl.where(ends, part, 0.0))
        is_finite = is_row & (tl.max(strange, 0) == 0)
        scale = tl.math.div_rn(tl.max(largest, 0), _LARGEST)
        divisor = tl.where(scale > 0.0, scale, 1.0)
        scale = tl.where(is_finite, scale, float("nan"))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = is_row & (column < width)
        part = widen(tl.load(at + column.to(tl.int64) * column_stride, mask=inside, other=0.0))
        if IS_INT8:
            part = tl.where(is_finite, part, 0.0)
            whole = tl.math.div_rn(part, divisor + tl.zeros([BLOCK], tl.float32)) + _TO_EVEN - _TO_EVEN
            tl.store(out + column, whole.to(tl.int8), mask=column < width)
        else:
            tl.store(out + column, narrow(tl.where(is_row, part, float("nan")), tl.bfloat16), mask=column < width)
    tl.store(scales + tl.program_id(0), scale)


@register("kernels", "capture_pack")
class CapturePack(Kernel):
    """Rows [n] of states [b t m] of any strides, as bfloat16 or int8; see the reference.

    One launch, straight into the block: what is read is what is kept.
    Twin: cacheprobe.ops.packing.pack_rows, ==.
    """

    name = "capture_pack"
    cases = (
        Case("ragged", torch.float32, {"b": 2, "t": 3, "m": 37, "n": 5, "int8": 0}),
        Case("eight", torch.bfloat16, {"b": 2, "t": 3, "m": 37, "n": 7, "int8": 1}),
        Case("strange", torch.float32, {"b": 1, "t": 5, "m": 9, "n": 5, "int8": 1, "strange": 1}),
        Case("half", torch.float16, {"b": 1, "t": 2, "m": 2100, "n": 2, "int8": 1}),
    )
    full = Case("smollm2-135m", torch.bfloat16, {"b": 16, "t": 16, "m": 576, "n": 256, "int8": 1})
    because = "numbers are rounded once, alike"

    @staticmethod
    def plan(states: Tensor, rows: Tensor, kind: str) -> Plan:
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r} of packed rows; kinds are {', '.join(KINDS)}")
        batch, num_slots, width = states.shape
        dtype = torch.int8 if kind == "int8" else torch.bfloat16
        values = torch.empty(len(rows), width, dtype=dtype, device=states.device)
        scales = torch.empty(len(rows), dtype=torch.float32, device=states.device)
        strides = dict(zip(("batch_stride", "slot_stride", "column_stride"), states.stride(), strict=True))
        sizes = {"num_states": batch * num_slots, "num_slots": num_slots, "width": width}
        arguments = {"states": states, "rows": rows, "values": values, "scales": scales, **sizes, **strides}
        constants = {"IS_INT8": kind == "int8", "BLOCK": min(_LARGEST_BLOCK, next_power_of_2(width))}
        return Plan([Launch(_capture_pack, (len(rows),), arguments, constants)], Packed(values, scales))

    reference = staticmethod(packing.pack_rows)

    @staticmethod
    def exact(states: Tensor, rows: Tensor, kind: str) -> Outcome:
        """Of rows that hold numbers: the scale. What is rounded has its reference."""
        flat = states.flatten(0, 1).double()
        if kind == "bfloat16":
            return {"scales": torch.ones(len(rows), dtype=torch.float64, device=states.device)}
        found = []
        for row in rows.tolist():
            values = flat[row] if 0 <= row < len(flat) else flat[0] * torch.nan
            is_finite = bool(torch.isfinite(values).all())
            found.append(values.abs().max() / packing.LARGEST if is_finite else values.sum() * torch.nan)
        return {"scales": torch.stack(found)}

    @staticmethod
    def inputs(case: Case, draws: Draws) -> Arguments:
        """Every other column of a wider tensor, slots before batch; rows repeat, the first is none, and of many
        the last is the one behind the source."""
        b, t, m, n = (case.sizes[name] for name in ("b", "t", "m", "n"))
        states = draws.normal(t, b, 2 * m, dtype=case.dtype)[:, :, ::2].transpose(0, 1)
        rows = draws.integers(0, b * t, n)
        if case.sizes.get("strange"):
            states[0, 0], states[0, 1, 3], states[0, 2, 0] = 0.0, torch.nan, -torch.inf
            rows = torch.arange(n, device=draws.device)
        elif draws.device.type != "meta":
            rows[0] = -1
            rows[-1] = b * t if n > 3 else rows[-1]
        return {"states": states, "rows": rows, "kind": "int8" if case.sizes["int8"] else "bfloat16"}

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return by_rows(arguments, ["rows"], Packed._fields)

    @staticmethod
    def work(arguments: Arguments) -> Work:
        states, n = arguments["states"], len(arguments["rows"])
        written = 1 if arguments["kind"] == "int8" else 2
        return Work(n * states.shape[2] * (states.element_size() + written), 0)
