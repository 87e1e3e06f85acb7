"""Attention over the cache with one schedule for every phase: prefill, decode and verify give a token the same bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.ops import references as attention
from cacheprobe_kernels.attention_cases import attention_inputs, attention_variants, exact_attention
from cacheprobe_kernels.base import (
    INTERPRETED,
    Arguments,
    Case,
    Kernel,
    Launch,
    Plan,
    Work,
    next_power_of_2,
    require_dense_rows,
    require_dense_slots,
    require_inside,
    require_integers,
    require_one_device,
    require_one_dtype,
    require_shape,
    size_in_bytes,
)
from cacheprobe_kernels.tiles import narrow, product

BLOCK_Q, BLOCK_S = 16, 16 if INTERPRETED else 64
"""Queries of a tile and slots of a step, whatever the length of the queries or of the text."""

SPLIT = 32 if INTERPRETED else 256
"""Slots of one program. Splits begin at slot 0 and have one size, so a text's splits are a function of its length.
Smaller in the interpreter, where a short text is to have several.
"""


@triton.jit(do_not_specialize=["num_queries"])
def _split(
    q, keys, values, rows, positions, hidden, part, best_out, total_out,
    num_queries, num_groups, num_heads, num_splits, window, scale, q_batch, q_head, q_query,
    k_row, k_head, v_row, v_head, hidden_row, hidden_head,
    DK: tl.constexpr, DV: tl.constexpr, HAS_HIDDEN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of packed queries (query x head of the group) over one split: sums, their weight, the largest score."""
    split, kv_head, batch = tl.program_id(1), tl.program_id(2) % num_heads, tl.program_id(2) // num_heads
    packed = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    query, head = packed // num_groups, kv_head * num_groups + packed % num_groups
    is_real = query < num_queries
    own = tl.load(positions + batch * num_queries + query, mask=is_real, other=-1)
    last = tl.max(own, 0)
    if split * SPLIT <= last:
        row = tl.load(rows + batch)
        across, down = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
        q_at = q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + query.to(tl.int64) * q_query
        asked = tl.load(q_at[:, None] + across[None, :], mask=is_real[:, None] & (across < DK)[None, :], other=0.0)
        k_held, v_held = row * k_row + kv_head * k_head, row * v_row + kv_head * v_head
        best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q], tl.float32)
        sums = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
        for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, last + 1), BLOCK_S):
            slots = start + tl.arange(0, BLOCK_S)
            written = slots <= last  # what lies behind may be anything
            k_at = keys + k_held + slots * DK
            k = tl.load(k_at[None, :] + across[:, None], mask=written[None, :] & (across < DK)[:, None], other=0.0)
            scores = product(asked, k, tl.zeros([BLOCK_Q, BLOCK_S], tl.float32)) * scale
            seen = slots[None, :] <= own[:, None]
            if HAS_WINDOW:
                seen = seen & (slots[None, :] > own[:, None] - window)
            if HAS_HIDDEN:
                gone_at = hidden + row * hidden_row + kv_head * hidden_head + slots
                gone = tl.load(gone_at, mask=written, other=0) != 0
                seen = seen & ((slots[None, :] == own[:, None]) | (gone == 0)[None, :])
            scores = tl.where(seen, scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            above = tl.where(new_best == float("-inf"), 0.0, new_best)
            weights = tl.exp(scores - above[:, None])
            fading = tl.exp(best - above)
            v_at = values + v_held + slots * DV
            v = tl.load(v_at[:, None] + down[None, :], mask=written[:, None] & (down < DV)[None, :], other=0.0)
            new_sums = product(narrow(weights, v.dtype), v, sums * fading[:, None])
            # a step of which a row sees nothing leaves the row as it was, whoever else is in the tile
            sees = tl.max(seen.to(tl.int32), 1) > 0
            sums = tl.where(sees[:, None], new_sums, sums)
            total = tl.where(sees, total * fading + tl.sum(weights, 1), total)
            best = new_best
        place = (tl.program_id(2).to(tl.int64) * num_queries * num_groups + packed) * num_splits + split
        tl.store(part + place[:, None] * DV + down[None, :], sums, mask=is_real[:, None] & (down < DV)[None, :])
        tl.store(best_out + place, best, mask=is_real)
        tl.store(total_out + place, total, mask=is_real)


@triton.jit(do_not_specialize=["num_queries"])
def _join(
    part, best_in, total_in, positions, out, num_queries, num_groups, num_heads, num_splits,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of packed queries: each joins its splits, from the first to its own, one after another."""
    kv_head, batch = tl.program_id(1) % num_heads, tl.program_id(1) // num_heads
    packed = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    query, head = packed // num_groups, kv_head * num_groups + packed % num_groups
    is_real = query < num_queries
    own = tl.load(positions + batch * num_queries + query, mask=is_real, other=-1)
    down = tl.arange(0, BLOCK_V)
    first = (tl.program_id(1).to(tl.int64) * num_queries * num_groups + packed) * num_splits
    best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_V], tl.float32)
    for split in range(tl.max(own, 0) // SPLIT + 1):
        counts = split * SPLIT <= own
        there = tl.load(best_in + first + split, mask=counts, other=float("-inf"))
        counts = there > float("-inf")  # a split that lies before the query's window adds nothing either
        new_best = tl.maximum(best, there)
        above = tl.where(new_best == float("-inf"), 0.0, new_best)
        fading, coming = tl.exp(best - above), tl.exp(there - above)
        inside = counts[:, None] & (down < DV)[None, :]
        more = tl.load(part + (first + split)[:, None] * DV + down[None, :], mask=inside, other=0.0)
        weight = tl.load(total_in + first + split, mask=counts, other=0.0)
        sums = tl.where(counts[:, None], sums * fading[:, None] + more * coming[:, None], sums)
        total = tl.where(counts, total * fading + weight * coming, total)
        best = new_best
    place = ((batch.to(tl.int64) * num_heads * num_groups + head) * num_queries + query) * DV
    result = tl.math.div_rn(sums, tl.zeros([BLOCK_Q, BLOCK_V], tl.float32) + tl.where(is_real, total, 1.0)[:, None])
    tl.store(out + place[:, None] + down[None, :], narrow(result, out.dtype.element_ty),
             mask=is_real[:, None] & (down < DV)[None, :])  # fmt: skip


@register("kernels", "cached_attention")
class CachedAttention(Kernel):
    """Queries [b h t dk] of any number over keys [r g s dk] and values [r g s dv]; see the reference for the arguments.

    A query's bits are a function of itself, its position and the slots that it sees. The steps along the slots and the
    splits lie where they lie for every query, splits are joined in their order, and what a query does not see leaves no
    trace, not even of a zero's sign. Queries of the heads that share keys fill one tile.
    Source: online softmax, Milakov & Gimelshein 2018 (arXiv 1805.02867); splits along the slots as in Flash-Decoding,
    Dao et al. 2023; their fixed size as in batch_invariant_ops, Thinking Machines Lab, 2025.
    Twin: cacheprobe.ops.references.cached_attention, close, since sums are reordered; the weights are rounded
    to 16 bits before they meet values of 16 bits.
    """

    name = "cached_attention"
    cases = (
        Case("decode", torch.float32, {"b": 2, "g": 2, "groups": 3, "t": 1, "s": 24, "dk": 8, "dv": 12, "start": 18}),
        Case("splits", torch.bfloat16, {"b": 2, "g": 1, "groups": 2, "t": 9, "s": 48, "dk": 20, "dv": 16, "start": 28}),
        Case("window", torch.float16, {"b": 1, "g": 1, "groups": 1, "t": 18, "s": 90, "dk": 16, "dv": 16, "start": 60,
                                       "window": 21}),
        Case("hidden", torch.float32, {"b": 2, "g": 1, "groups": 2, "t": 4, "s": 50, "dk": 16, "dv": 8, "start": 40,
                                       "has_hidden": 1}),
    )  # fmt: skip
    full = Case("smollm2-135m", torch.bfloat16,
                {"b": 16, "g": 3, "groups": 3, "t": 16, "s": 2048, "dk": 64, "dv": 64, "start": 1500})  # fmt: skip
    because = "sums are reordered, and weights are rounded to the type of the values"

    @staticmethod
    def plan(
        q: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float,
        hidden: Tensor | None = None, window: int | None = None,
    ) -> Plan:  # fmt: skip
        require_dense_rows(q=q, hidden=hidden)
        require_dense_slots(keys=keys, values=values)
        require_one_dtype(q=q, keys=keys, values=values)
        (batch, heads, count, dk), (num_rows, kv_heads, capacity, dv) = q.shape, values.shape
        if rows.shape != (batch,) or positions.shape != (batch, count):
            raise ValueError(
                f"queries of {batch} x {count} tokens need as many rows and positions, got {tuple(rows.shape)} and "
                f"{tuple(positions.shape)}; stage one cache row for each batch index"
            )
        if heads % kv_heads:
            raise ValueError(f"{heads} heads of queries cannot share {kv_heads} heads of keys evenly")
        require_shape("keys", keys, num_rows, kv_heads, capacity, dk)
        require_shape("hidden", hidden, num_rows, kv_heads, capacity)
        require_one_device(q=q, keys=keys, values=values, rows=rows, positions=positions, hidden=hidden)
        require_integers(rows=rows, positions=positions)
        require_inside("rows", rows, num_rows)
        require_inside("positions", positions, capacity)
        groups, num_splits = heads // kv_heads, triton.cdiv(capacity, SPLIT)
        places = (batch * kv_heads, count * groups, num_splits)
        part = torch.empty(*places, dv, dtype=torch.float32, device=q.device)
        best, total = (torch.empty(places, dtype=torch.float32, device=q.device) for _ in range(2))
        out = torch.empty(batch, heads, count, dv, dtype=q.dtype, device=q.device)
        sizes = {"num_queries": count, "num_groups": groups, "num_heads": kv_heads, "num_splits": num_splits}
        constants = {"DV": dv, "BLOCK_V": max(16, next_power_of_2(dv)), "BLOCK_Q": BLOCK_Q, "SPLIT": SPLIT}
        shared = {"positions": positions.contiguous(), **sizes}
        strides = dict(zip(("q_batch", "q_head", "q_query"), q.stride(), strict=False))
        cache = {"keys": keys, "values": values, "rows": rows, "hidden": keys if hidden is None else hidden}
        for name, held in (("k", keys), ("v", values), ("hidden", hidden)):
            strides |= {f"{name}_row": held.stride(0), f"{name}_head": held.stride(1)} if held is not None else {
                f"{name}_row": 0, f"{name}_head": 0}  # fmt: skip
        asked = {"q": q, **strides, "window": window or 0, "scale": scale}
        flags = {"HAS_HIDDEN": hidden is not None, "HAS_WINDOW": window is not None}
        blocks = {"DK": dk, "BLOCK_K": max(16, next_power_of_2(dk)), "BLOCK_S": BLOCK_S}
        num_warps = 8 if q.element_size() == 2 else 4  # the other number spills registers
        written = {"part": part, "best_out": best, "total_out": total}
        return Plan(
            [
                Launch(_split, (triton.cdiv(count * groups, BLOCK_Q), num_splits, batch * kv_heads),
                       {**asked, **cache, **shared, **written}, {**constants, **flags, **blocks}, num_warps),
                Launch(_join, (triton.cdiv(count * groups, BLOCK_Q), batch * kv_heads),
                       {"part": part, "best_in": best, "total_in": total, "out": out, **shared}, constants),
            ],
            out,
        )  # fmt: skip

    reference = staticmethod(attention.cached_attention)
    exact = staticmethod(exact_attention)
    inputs = staticmethod(attention_inputs)
    variants = staticmethod(attention_variants)

    @staticmethod
    def rtol(name: str, case: Case) -> float | None:
        return {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[case.dtype]

    @staticmethod
    def work(arguments: Arguments) -> Work:
        q, values = arguments["q"], arguments["values"]
        (b, h, t, dk), (_, g, s, dv) = q.shape, values.shape
        held = b * g * s * (dk + dv) * q.element_size()
        return Work(held + size_in_bytes(q) + b * h * t * dv * q.element_size(), 2 * b * h * t * s * (dk + dv))
