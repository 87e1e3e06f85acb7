"""Rows of a pass gathered into a block of captured states, and rounded to its type."""

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
    require_integers,
    require_one_device,
    require_shape,
)
from cacheprobe_kernels.tiles import narrow, widen

_LARGEST_BLOCK = 2048
_DTYPES = {0: torch.bfloat16, 1: torch.float32, 2: torch.float16}
"""Kept type of a case, by its size "kept"."""


@triton.jit(do_not_specialize=["num_slots", "num_states"])
def _capture_pack(
    states, rows, out, num_states, num_slots, width, batch_stride, slot_stride, column_stride, out_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of one row. A number that keeps its type keeps its bits."""
    row = tl.load(rows + tl.program_id(0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row >= 0) & (row < num_states) & (column < width)
    at = states + (row // num_slots) * batch_stride + (row % num_slots) * slot_stride
    part = tl.load(at + column.to(tl.int64) * column_stride, mask=inside, other=0.0)
    if part.dtype != out.dtype.element_ty:
        part = narrow(widen(part), out.dtype.element_ty)
    tl.store(out + tl.program_id(0).to(tl.int64) * out_stride + column, part, mask=inside)


@register("kernels", "capture_pack")
class CapturePack(Kernel):
    """Rows [n] of states [b t m] of any strides to out [n m], in the type of out; see the reference.

    One launch, straight into the block: what is read is what is kept.
    Twin: cacheprobe.ops.references.pack_rows, ==.
    """

    name = "capture_pack"
    cases = (
        Case("ragged", torch.float32, {"b": 2, "t": 3, "m": 37, "n": 5, "kept": 0}),
        Case("alike", torch.bfloat16, {"b": 2, "t": 3, "m": 37, "n": 7, "kept": 0}),
        Case("wider", torch.float16, {"b": 1, "t": 2, "m": 2100, "n": 2, "kept": 1}),
        Case("halves", torch.float32, {"b": 1, "t": 5, "m": 9, "n": 5, "kept": 2}),
    )
    full = Case("smollm2-135m", torch.bfloat16, {"b": 16, "t": 16, "m": 576, "n": 256, "kept": 0})
    writes = ("out",)
    because = "numbers are rounded once, alike"

    @staticmethod
    def plan(states: Tensor, rows: Tensor, out: Tensor) -> Plan:
        require_dense_rows(out=out)
        batch, num_slots, width = states.shape
        require_shape("rows", rows, out.shape[0])
        require_shape("out", out, len(rows), width)
        require_one_device(states=states, rows=rows, out=out)
        require_integers(rows=rows)
        strides = dict(zip(("batch_stride", "slot_stride", "column_stride"), states.stride(), strict=True))
        sizes = {"num_states": batch * num_slots, "num_slots": num_slots, "width": width, "out_stride": out.stride(0)}
        block = min(_LARGEST_BLOCK, next_power_of_2(width))
        grid = (len(rows), triton.cdiv(width, block))
        arguments = {"states": states, "rows": rows, "out": out, **sizes, **strides}
        return Plan([Launch(_capture_pack, grid, arguments, {"BLOCK": block})], None)

    reference = staticmethod(references.pack_rows)

    @staticmethod
    def exact(**arguments: object) -> Outcome:
        return {}

    @staticmethod
    def inputs(case: Case, draws: Draws) -> Arguments:
        """Every other column of a wider tensor, slots before batch; rows repeat, the first is none, and of many
        the last is the one behind the source. A few numbers are infinite or no number."""
        b, t, m, n = (case.sizes[name] for name in ("b", "t", "m", "n"))
        states = draws.normal(t, b, 2 * m, dtype=case.dtype)[:, :, ::2].transpose(0, 1)
        rows = draws.integers(0, b * t, n)
        if draws.device.type != "meta":
            states[0, 0, 1], states[0, 1, 3] = torch.inf, torch.nan
            rows[0] = -1
            rows[-1] = b * t if n > 3 else rows[-1]
        return {"states": states, "rows": rows, "out": draws.normal(n, m, dtype=_DTYPES[case.sizes["kept"]])}

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return by_rows(arguments, ["rows", "out"], ["out"])

    @staticmethod
    def work(arguments: Arguments) -> Work:
        states, out = arguments["states"], arguments["out"]
        return Work(out.numel() * (states.element_size() + out.element_size()), 0)
