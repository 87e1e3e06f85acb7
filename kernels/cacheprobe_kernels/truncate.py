"""Slots of many cache rows given up at once."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.ops import cache_rows
from cacheprobe_kernels.base import Arguments, Case, Draws, Kernel, Launch, Outcome, Plan, Variant, Work, one_by_one

_WRITTEN = ("codes", "hidden", "lengths")
_FREE = tl.constexpr(cache_rows.FREE)


@triton.jit
def _truncate(codes, hidden, lengths, rows, new_lengths, refused, num_rows, capacity, BLOCK: tl.constexpr):
    """One row by one warp, which reads the length before it writes it."""
    batch = tl.program_id(0)
    row, new = tl.load(rows + batch), tl.load(new_lengths + batch)
    is_row = (row >= 0) & (row < num_rows)
    length = tl.load(lengths + row, mask=is_row, other=-1)
    is_taken = is_row & (new >= 0) & (new <= length)
    for first in range(0, capacity, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        beyond = is_taken & (slot >= new) & (slot < capacity)
        tl.store(codes + row * capacity + slot, tl.full([BLOCK], _FREE, tl.uint8), mask=beyond & (slot < length))
        tl.store(hidden + row * capacity + slot, tl.full([BLOCK], 0, tl.int1), mask=beyond)
    tl.store(lengths + row, new, mask=is_taken)
    tl.store(refused + batch, is_taken == 0)


@register("kernels", "truncate")
class Truncate(Kernel):
    """Cache rows rows[b] forget their slots from new_lengths[b] on; see the reference.

    Twin: cacheprobe.ops.cache_rows.truncate_rows, ==.
    """

    name = "truncate"
    cases = (
        Case("ragged", torch.uint8, {"b": 4, "s": 70}),
        Case("one", torch.uint8, {"b": 1, "s": 1}),
    )
    full = Case("smollm2-135m", torch.uint8, {"b": 64, "s": 2048})
    writes = _WRITTEN
    because = "nothing is computed"

    @staticmethod
    def plan(codes: Tensor, hidden: Tensor, lengths: Tensor, rows: Tensor, new_lengths: Tensor) -> Plan:
        if not (codes.is_contiguous() and hidden.is_contiguous()):
            raise ValueError("the cache's codes and hidden slots must be contiguous, as KVCache makes them")
        num_rows, capacity = codes.shape
        refused = torch.empty(len(rows), dtype=torch.bool, device=codes.device)
        tensors = {"codes": codes, "hidden": hidden, "lengths": lengths, "rows": rows, "new_lengths": new_lengths}
        arguments = {**tensors, "refused": refused, "num_rows": num_rows, "capacity": capacity}
        return Plan([Launch(_truncate, (len(rows),), arguments, {"BLOCK": 256}, num_warps=1)], refused)

    reference = staticmethod(cache_rows.truncate_rows)

    @staticmethod
    def exact(**arguments: object) -> Outcome:
        return {}

    @staticmethod
    def inputs(case: Case, draws: Draws) -> Arguments:
        """Of four and more rows the second would grow, and the third is none."""
        b, s = case.sizes["b"], case.sizes["s"]
        lengths = draws.integers(0, s + 1, b + 1)
        rows, new_lengths = draws.order(b + 1)[:b], draws.integers(0, s, b)
        if draws.device.type != "meta":
            new_lengths = torch.minimum(new_lengths, lengths[rows])
            if b > 3:
                new_lengths[1], rows[2] = lengths[rows[1]] + 1, b + 1
        ledger = {name: draws.integers(0, 2, b + 1, s, dtype=dtype) for name, dtype in
                  (("codes", torch.uint8), ("hidden", torch.bool))}  # fmt: skip
        return {**ledger, "lengths": lengths, "rows": rows, "new_lengths": new_lengths}

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return one_by_one(arguments, ("rows", "new_lengths"), _WRITTEN)

    @staticmethod
    def work(arguments: Arguments) -> Work:
        return Work(2 * len(arguments["rows"]) * arguments["codes"].shape[1], 0)
