"""New keys and values into the slots of the cache."""

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
    next_power_of_2,
    one_by_one,
    require_dense_rows,
    require_dense_slots,
    require_integers,
    require_one_device,
    require_one_dtype,
    require_shape,
    size_in_bytes,
)

_BLOCK_T = 16


@triton.jit(do_not_specialize=["width"])
def _store_kv(
    k, v, keys, values, rows, starts, width, num_rows, capacity,
    k_batch, k_head, k_slot, v_batch, v_head, v_slot, k_row, k_part, v_row, v_part,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Some slots of one head of one batch index."""
    batch, head = tl.program_id(0), tl.program_id(1)
    slot = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    row, start = tl.load(rows + batch), tl.load(starts + batch)
    is_taken = (row >= 0) & (row < num_rows) & (start >= 0) & (start + width <= capacity)
    there = is_taken & (slot < width)
    across, down = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    k_at = k + batch.to(tl.int64) * k_batch + head * k_head + slot[:, None] * k_slot + across[None, :]
    v_at = v + batch.to(tl.int64) * v_batch + head * v_head + slot[:, None] * v_slot + down[None, :]
    in_k, in_v = there[:, None] & (across < DK)[None, :], there[:, None] & (down < DV)[None, :]
    new_k, new_v = tl.load(k_at, mask=in_k, other=0.0), tl.load(v_at, mask=in_v, other=0.0)
    k_to = keys + row * k_row + head * k_part + (start + slot)[:, None] * DK + across[None, :]
    v_to = values + row * v_row + head * v_part + (start + slot)[:, None] * DV + down[None, :]
    tl.store(k_to, new_k, mask=in_k)
    tl.store(v_to, new_v, mask=in_v)


@register("kernels", "store_kv")
class StoreKV(Kernel):
    """k, v [b g t d] to slots starts[b].. of cache rows rows[b]; see the reference.

    One launch for a layer: a bare copy, and no number is computed.
    Twin: cacheprobe.ops.references.store_kv, ==.
    """

    name = "store_kv"
    cases = (
        Case("ragged", torch.bfloat16, {"b": 3, "g": 2, "t": 5, "s": 20, "dk": 6, "dv": 10}),
        Case("one-token", torch.float32, {"b": 2, "g": 1, "t": 1, "s": 9, "dk": 8, "dv": 3}),
        Case("long", torch.float16, {"b": 2, "g": 1, "t": 35, "s": 50, "dk": 4, "dv": 4}),
    )
    full = Case("smollm2-135m", torch.bfloat16, {"b": 64, "g": 3, "t": 16, "s": 2048, "dk": 64, "dv": 64})
    writes = ("keys", "values")
    because = "nothing is computed"

    @staticmethod
    def plan(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor, starts: Tensor) -> Plan:
        require_dense_rows(k=k, v=v)
        require_dense_slots(keys=keys, values=values)
        require_one_dtype(k=k, v=v, keys=keys, values=values)
        (batch, num_heads, width, dk), (num_rows, _, capacity, dv) = k.shape, values.shape
        if rows.shape != (batch,) or starts.shape != (batch,) or v.shape[:3] != k.shape[:3]:
            raise ValueError(
                f"keys of {tuple(k.shape)} need as many values, rows and starts, got {tuple(v.shape)}, "
                f"{tuple(rows.shape)} and {tuple(starts.shape)}; stage one cache row for each batch index"
            )
        require_shape("keys", keys, num_rows, num_heads, capacity, dk)
        require_shape("values", values, num_rows, num_heads, capacity, v.shape[3])
        require_one_device(k=k, v=v, keys=keys, values=values, rows=rows, starts=starts)
        require_integers(rows=rows, starts=starts)
        tensors = {"k": k, "v": v, "keys": keys, "values": values, "rows": rows, "starts": starts}
        strides = dict(zip(("k_batch", "k_head", "k_slot"), k.stride(), strict=False))
        strides |= dict(zip(("v_batch", "v_head", "v_slot"), v.stride(), strict=False))
        strides |= dict(zip(("k_row", "k_part"), keys.stride(), strict=False))
        strides |= dict(zip(("v_row", "v_part"), values.stride(), strict=False))
        sizes = {"width": width, "num_rows": num_rows, "capacity": capacity}
        blocks = {"BLOCK_K": next_power_of_2(dk), "BLOCK_V": next_power_of_2(dv), "BLOCK_T": _BLOCK_T}
        grid = (batch, num_heads, triton.cdiv(width, _BLOCK_T))
        return Plan([Launch(_store_kv, grid, {**tensors, **sizes, **strides}, {"DK": dk, "DV": dv, **blocks})], None)

    reference = staticmethod(references.store_kv)

    @staticmethod
    def exact(**arguments: object) -> Outcome:
        return {}

    @staticmethod
    def inputs(case: Case, draws: Draws) -> Arguments:
        """Cache rows in another order than those of the batch, in a cache with more slots than it counts; of three
        and more the first leaves the capacity by one, and the second is of no row."""
        b, g, t, s, dk, dv = (case.sizes[name] for name in ("b", "g", "t", "s", "dk", "dv"))
        rows, starts = draws.order(b + 2)[:b], draws.integers(0, s - t + 1, b)
        if b > 2 and draws.device.type != "meta":
            starts[0], rows[1] = s - t + 1, -1
        made = {"k": (b, t, g, dk), "v": (b, t, g, dv)}  # as a model's projections leave them
        new = {name: draws.normal(*shape, dtype=case.dtype).transpose(1, 2) for name, shape in made.items()}
        held = {"keys": dk, "values": dv}
        cache = {name: draws.normal(b + 2, g, s + 3, d, dtype=case.dtype)[:, :, :s] for name, d in held.items()}
        return {**new, **cache, "rows": rows, "starts": starts}

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return one_by_one(arguments, ("k", "v", "rows", "starts"), StoreKV.writes)

    @staticmethod
    def work(arguments: Arguments) -> Work:
        return Work(2 * size_in_bytes(arguments["k"], arguments["v"]), 0)
