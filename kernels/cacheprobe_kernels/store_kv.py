"""New keys and values into the cache, and into its ledger who wrote them."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.ops import cache_rows
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
    next_power_of_2,
    one_by_one,
    require_dense_rows,
    require_one_dtype,
    size_in_bytes,
)

_WRITTEN = ("keys", "values", "codes", "lengths")


@triton.jit(do_not_specialize=["width"])
def _store_kv(
    k, v, keys, values, codes, lengths, rows, starts, counts, refused, width, num_rows, capacity, num_heads, provenance,
    k_batch, k_head, k_slot, v_batch, v_head, v_slot,
    DK: tl.constexpr, DV: tl.constexpr, MARKS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Some slots of one head of one batch index. The first program of a row keeps its ledger."""
    batch, head = tl.program_id(0), tl.program_id(1)
    slot = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, start, count = tl.load(rows + batch), tl.load(starts + batch), tl.load(counts + batch)
    is_row = (row >= 0) & (row < num_rows)
    # the ledger's program may have lengthened the row by now, which changes no answer: refused rows stay as they are
    length = tl.load(lengths + row, mask=is_row, other=-1)
    is_taken = is_row & (start >= 0) & (start <= length) & (start + width <= capacity) & (count >= 0) & (count <= width)
    at = ((row * num_heads + head) * capacity + start + slot)[:, None]
    there = is_taken & (slot < width)
    across, down = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_at = k + batch.to(tl.int64) * k_batch + head * k_head + slot[:, None] * k_slot + across[None, :]
    v_at = v + batch.to(tl.int64) * v_batch + head * v_head + slot[:, None] * v_slot + down[None, :]
    in_k, in_v = there[:, None] & (across < DK)[None, :], there[:, None] & (down < DV)[None, :]
    tl.store(keys + at * DK + across[None, :], tl.load(k_at, mask=in_k, other=0.0), mask=in_k)
    tl.store(values + at * DV + down[None, :], tl.load(v_at, mask=in_v, other=0.0), mask=in_v)
    if head == 0:
        if MARKS:
            mark = (slot * 0 + provenance).to(tl.uint8)
            tl.store(codes + row * capacity + start + slot, mark, mask=is_taken & (slot < count))
        if tl.program_id(2) == 0:
            tl.store(refused + batch, is_taken == 0)
            if MARKS:
                tl.store(lengths + row, tl.maximum(length, start + count), mask=is_taken)


@register("kernels", "store_kv")
class StoreKV(Kernel):
    """k, v [b g t d] to slots starts[b].. of cache rows rows[b], with or without the ledger; see the reference.

    One launch for a layer: a bare copy, and no number is computed.
    Twin: cacheprobe.ops.cache_rows.store_kv, ==.
    """

    name = "store_kv"
    cases = (
        Case("ragged", torch.bfloat16, {"b": 3, "g": 2, "t": 5, "s": 20, "dk": 6, "dv": 10, "marks": 1}),
        Case("no-ledger", torch.float32, {"b": 2, "g": 1, "t": 1, "s": 9, "dk": 8, "dv": 3, "marks": 0}),
        Case("long", torch.float16, {"b": 2, "g": 1, "t": 35, "s": 50, "dk": 4, "dv": 4, "marks": 1}),
    )
    full = Case("smollm2-135m", torch.bfloat16, {"b": 64, "g": 3, "t": 16, "s": 2048, "dk": 64, "dv": 64, "marks": 1})
    writes = _WRITTEN
    because = "nothing is computed"

    @staticmethod
    def plan(
        k: Tensor, v: Tensor, keys: Tensor, values: Tensor, codes: Tensor, lengths: Tensor, rows: Tensor,
        starts: Tensor, counts: Tensor, provenance: int | None = None,
    ) -> Plan:  # fmt: skip
        require_dense_rows(k=k, v=v)
        require_one_dtype(k=k, v=v, keys=keys, values=values)
        if not (keys.is_contiguous() and values.is_contiguous() and codes.is_contiguous()):
            raise ValueError("the cache's keys, values and codes must be contiguous, as KVCache makes them")
        (batch, num_heads, width, dk), (num_rows, _, capacity, dv) = k.shape, values.shape
        refused = torch.empty(batch, dtype=torch.bool, device=k.device)
        tensors = {"k": k, "v": v, "keys": keys, "values": values, "codes": codes, "lengths": lengths, "rows": rows}
        strides = dict(zip(("k_batch", "k_head", "k_slot"), k.stride(), strict=False))
        strides |= dict(zip(("v_batch", "v_head", "v_slot"), v.stride(), strict=False))
        sizes = {"width": width, "num_rows": num_rows, "capacity": capacity, "num_heads": num_heads}
        arguments = {**tensors, "starts": starts, "counts": counts, "refused": refused, **sizes, **strides}
        blocks = {"BLOCK_K": next_power_of_2(dk), "BLOCK_V": next_power_of_2(dv), "BLOCK_T": 16}
        constants = {"DK": dk, "DV": dv, "MARKS": provenance is not None, **blocks}
        grid = (batch, num_heads, triton.cdiv(width, 16))
        return Plan([Launch(_store_kv, grid, {**arguments, "provenance": provenance or 0}, constants)], refused)

    reference = staticmethod(cache_rows.store_kv)

    @staticmethod
    def exact(**arguments: object) -> Outcome:
        return {}

    @staticmethod
    def inputs(case: Case, draws: Draws) -> Arguments:
        """Cache rows in another order than those of the batch; of three and more the first leaves the
        capacity by one, and the second leaves a hole."""
        b, g, t, s, dk, dv = (case.sizes[name] for name in ("b", "g", "t", "s", "dk", "dv"))
        r = b + 2
        lengths = draws.integers(1, s - t, r)
        rows = draws.order(r)[:b]
        starts = draws.integers(0, 1, b) if draws.device.type == "meta" else (lengths[rows] - 1).clamp(min=0)
        if b > 2 and draws.device.type != "meta":
            starts[0] = lengths[rows[0]] = s - t + 1
            starts[1] += 2
        made = {"k": (b, t, g, dk), "v": (b, t, g, dv)}  # as a model's projections leave them
        new = {name: draws.normal(*shape, dtype=case.dtype).transpose(1, 2) for name, shape in made.items()}
        held = {
            "keys": draws.normal(r, g, s, dk, dtype=case.dtype),
            "values": draws.normal(r, g, s, dv, dtype=case.dtype),
        }
        ledger = {"codes": draws.integers(0, 5, r, s, dtype=torch.uint8), "lengths": lengths}
        where = {"rows": rows, "starts": starts, "counts": draws.integers(0, t + 1, b)}
        return {**new, **held, **ledger, **where, "provenance": 3 if case.sizes["marks"] else None}

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return one_by_one(arguments, ("k", "v", "rows", "starts", "counts"), _WRITTEN)

    @staticmethod
    def work(arguments: Arguments) -> Work:
        return Work(2 * size_in_bytes(arguments["k"], arguments["v"]), 0)
