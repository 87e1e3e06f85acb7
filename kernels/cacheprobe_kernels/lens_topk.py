"""States through a final norm and an unembedding to top tokens, ranks and entropy; logits are never stored."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.ops import readout
from cacheprobe.ops.readout import Readout
from cacheprobe_kernels.base import (
    INTERPRETED,
    Arguments,
    Case,
    Kernel,
    Launch,
    Plan,
    Variant,
    Work,
    by_rows,
    next_power_of_2,
    require_dense_rows,
    require_integers,
    require_one_device,
    require_one_dtype,
    require_shape,
    size_in_bytes,
)
from cacheprobe_kernels.lens_cases import exact_readout, lens_inputs
from cacheprobe_kernels.matmul import BLOCK_N, BLOCK_O, block_width
from cacheprobe_kernels.ordering import NOBODY, NOTHING, put_in, to_key, to_value
from cacheprobe_kernels.rms_norm import RmsNorm
from cacheprobe_kernels.tiles import narrow, tile_product, widen

SPLIT = 32 if INTERPRETED else 1024
"""Ids of one program: a multiple of a tile's outputs, whatever the vocabulary."""


@triton.jit(do_not_specialize=["num_rows"])
def _logits_of_targets(
    states, weight, bias, targets, out, num_rows, width, vocabulary, state_stride, weight_stride,
    HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The logit of each row's target, from a tile of the shape that counts the others: equal ones have equal bits."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    across = tl.arange(0, BLOCK_O)
    theirs = tl.program_id(0).to(tl.int64) * BLOCK_N + across % BLOCK_N
    target = tl.load(targets + theirs, mask=theirs < num_rows, other=-1)
    target = tl.where(target < vocabulary, target, -1)
    logits = tile_product(
        states + rows * state_stride, rows < num_rows, weight + target * weight_stride, target >= 0, width,
        BLOCK_N, BLOCK_O, BLOCK_I,
    )  # fmt: skip
    if HAS_BIAS:
        logits += widen(tl.load(bias + target, mask=target >= 0, other=0.0))[None, :]
    own = across[None, :] == tl.arange(0, BLOCK_N)[:, None]
    logit = tl.sum(tl.where(own, widen(narrow(logits, states.dtype.element_ty)), 0.0), 1)
    tl.store(out + rows, logit, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _read_split(
    states, weight, bias, targets, target_logits, best_out, total_out, mean_out, before_out, keys_out, ids_out,
    num_rows, width, vocabulary, num_splits, state_stride, weight_stride,
    HAS_BIAS: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Rows of a tile over one split of the vocabulary: what is needed of its logits, tile after tile."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = rows < num_rows
    target = tl.load(targets + rows, mask=is_row, other=-1)
    target_logit = tl.load(target_logits + rows, mask=is_row, other=0.0)
    best = tl.full([BLOCK_N], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    mean = tl.zeros([BLOCK_N], tl.float32)
    before = tl.zeros([BLOCK_N], tl.int32)
    places = tl.arange(0, PADDED_K)[None, :] + tl.zeros([BLOCK_N, PADDED_K], tl.int32)
    top_keys = tl.where(places < TOP_K, NOTHING, NOBODY)  # places beyond are full from the start
    top_ids = vocabulary + places
    first = tl.program_id(1) * SPLIT
    for start in range(first, tl.minimum(first + SPLIT, vocabulary), BLOCK_O):
        ids = start + tl.arange(0, BLOCK_O)
        is_id = (ids < vocabulary)[None, :]
        logits = tile_product(
            states + rows * state_stride, is_row, weight + ids.to(tl.int64) * weight_stride, ids < vocabulary, width,
            BLOCK_N, BLOCK_O, BLOCK_I,
        )  # fmt: skip
        if HAS_BIAS:
            logits += widen(tl.load(bias + ids, mask=ids < vocabulary, other=0.0))[None, :]
        logits = widen(narrow(logits, states.dtype.element_ty))  # ranks are those of the model's own type
        is_equal_before = (logits == target_logit[:, None]) & (ids[None, :] < target[:, None])
        is_before = (logits > target_logit[:, None]) | is_equal_before
        before += tl.sum((is_before & is_id).to(tl.int32), 1)
        logits = tl.where(is_id, logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, 1))
        above = tl.where(new_best == float("-inf"), 0.0, new_best)
        fading = tl.exp(best - above)
        weights = tl.exp(logits - above[:, None])
        total = total * fading + tl.sum(weights, 1)
        # 0 times -inf: a token that cannot occur adds nothing to the mean
        mean = mean * fading + tl.sum(weights * tl.where(weights > 0, logits, 0.0), 1)
        best = new_best
        top_keys, top_ids = put_in(top_keys, top_ids, tl.where(is_id, to_key(logits), NOTHING), ids[None, :])
    at = rows * num_splits + tl.program_id(1)
    tl.store(best_out + at, best, mask=is_row)
    tl.store(total_out + at, total, mask=is_row)
    tl.store(mean_out + at, mean, mask=is_row)
    tl.store(before_out + at, before, mask=is_row)
    place = at[:, None] * PADDED_K + places
    tl.store(keys_out + place, tl.where(places < TOP_K, top_keys, NOTHING), mask=is_row[:, None])
    tl.store(ids_out + place, top_ids, mask=is_row[:, None])


@triton.jit
def _join(
    best_in, total_in, mean_in, before_in, keys_in, ids_in, targets, target_logits,
    top_ids, top_logprobs, entropy, rank, target_logprob, num_splits, vocabulary,
    TOP_K: tl.constexpr, PADDED_K: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """One row: its splits together."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PADDED_SPLITS)
    there = split < num_splits
    bests = tl.load(best_in + row * num_splits + split, mask=there, other=float("-inf"))
    best = tl.max(bests, 0)
    fading = tl.exp(bests - best)
    total = tl.sum(tl.load(total_in + row * num_splits + split, mask=there, other=0.0) * fading, 0)
    mean = tl.sum(tl.load(mean_in + row * num_splits + split, mask=there, other=0.0) * fading, 0)
    logsumexp = tl.log(total) + best
    tl.store(entropy + row, logsumexp - mean / total)
    target = tl.load(targets + row)
    target = tl.where(target < vocabulary, target, -1)
    before = tl.sum(tl.load(before_in + row * num_splits + split, mask=there, other=0), 0)
    tl.store(rank + row, tl.where(target < 0, -1, before).to(tl.int64))
    logprob = tl.load(target_logits + row) - logsumexp
    tl.store(target_logprob + row, tl.where(target < 0, float("nan"), logprob))

    candidate = tl.arange(0, PADDED_SPLITS * PADDED_K)
    there = candidate < num_splits * PADDED_K
    keys = tl.load(keys_in + row * num_splits * PADDED_K + candidate, mask=there, other=NOTHING)
    ids = tl.load(ids_in + row * num_splits * PADDED_K + candidate, mask=there, other=NOBODY)
    for k in tl.static_range(TOP_K):
        key = tl.max(keys, 0)
        token_id = tl.min(tl.where(keys == key, ids, NOBODY), 0)
        tl.store(top_ids + row * TOP_K + k, token_id.to(tl.int64))
        tl.store(top_logprobs + row * TOP_K + k, to_value(key) - logsumexp)
        keys = tl.where(ids == token_id, NOTHING, keys)


@register("kernels", "lens_topk")
class LensTopK(Kernel):
    """states [n m] read through norm_weight [m] and unembedding [v m]; see the reference for the arguments.

    A row's bits are a function of the row, its target and the vocabulary. Logits are rounded to the model's type before
    they are compared, and equal ones rank by the lower id. A target outside the vocabulary, which the reference
    refuses, is read as none: a GPU cannot raise. Memory: some numbers for each row and split, no logits.
    Source: online softmax, Milakov & Gimelshein 2018 (arXiv 1805.02867), section 4, which has the running top-k too.
    Twin: cacheprobe.ops.readout.read_states: ids and ranks == where no two logits differ by the order of a sum alone,
    numbers close.
    """

    name = "lens_topk"
    cases = (
        Case("ragged", torch.float32, {"n": 3, "m": 20, "v": 75, "top_k": 5, "has_bias": 1}),
        Case("few", torch.float16, {"n": 2, "m": 9, "v": 3, "top_k": 5, "has_bias": 0}),
        Case("two-tiles", torch.bfloat16, {"n": 17, "m": 16, "v": 20, "top_k": 1, "has_bias": 0, "is_normed": 1}),
        Case("ties", torch.float16, {"n": 4, "m": 6, "v": 70, "top_k": 5, "has_bias": 1, "flat": 16}, is_exact=True),
        Case(
            "rounded", torch.bfloat16, {"n": 2, "m": 16, "v": 40, "top_k": 4, "has_bias": 0, "step": 65}, is_exact=True
        ),
    )
    full = Case("smollm2-135m", torch.bfloat16, {"n": 240, "m": 576, "v": 49152, "top_k": 5, "has_bias": 0})
    because = "sums are reordered"

    @staticmethod
    def plan(
        states: Tensor, norm_weight: Tensor | None, eps: float, unembedding: Tensor, target_token_ids: Tensor,
        top_k: int, bias: Tensor | None = None,
    ) -> Plan:  # fmt: skip
        require_dense_rows(states=states, unembedding=unembedding, bias=bias)
        require_one_dtype(states=states, norm_weight=norm_weight, unembedding=unembedding, bias=bias)
        (count, width), vocabulary = states.shape, unembedding.shape[0]
        require_shape("norm_weight", norm_weight, width)
        require_shape("unembedding", unembedding, vocabulary, width)
        require_shape("target_token_ids", target_token_ids, count)
        require_shape("bias", bias, vocabulary)
        given = {"unembedding": unembedding, "target_token_ids": target_token_ids, "bias": bias}
        require_one_device(states=states, norm_weight=norm_weight, **given)
        require_integers(target_token_ids=target_token_ids)
        top_k, num_splits = min(top_k, vocabulary), triton.cdiv(vocabulary, SPLIT)
        norm, read = ([], states) if norm_weight is None else RmsNorm.plan(states, norm_weight, eps)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=states.device)

        target_logits, padded_k = new(count), next_power_of_2(top_k)
        partial = {f"{name}_out": new(count, num_splits) for name in ("best", "total", "mean")}
        partial["before_out"] = new(count, num_splits, dtype=torch.int32)
        for name in ("keys_out", "ids_out"):
            partial[name] = new(count, num_splits, padded_k, dtype=torch.int32)
        out = Readout(
            new(count, top_k, dtype=torch.long), new(count, top_k), new(count), new(count, dtype=torch.long), new(count)
        )
        targets = target_token_ids.contiguous()
        given = {"targets": targets, "target_logits": target_logits}
        weights = {"states": read, "weight": unembedding, "bias": unembedding if bias is None else bias}
        strides = {"state_stride": read.stride(0), "weight_stride": unembedding.stride(0)}
        shared = {**weights, **strides, "num_rows": count, "width": width}
        tile = {"BLOCK_N": BLOCK_N, "BLOCK_O": BLOCK_O, "BLOCK_I": block_width(states.dtype)}
        flags, tops = {"HAS_BIAS": bias is not None}, {"TOP_K": top_k, "PADDED_K": padded_k}
        tiles, schedule = triton.cdiv(count, BLOCK_N), {"num_warps": 8, "num_stages": 3}  # one for both products
        joined = dict(zip(("top_ids", "top_logprobs", "entropy", "rank", "target_logprob"), out, strict=True))
        sizes = {"vocabulary": vocabulary, "num_splits": num_splits}
        partial_in = {name.replace("_out", "_in"): value for name, value in partial.items()}
        return Plan(
            [
                *norm,
                Launch(_logits_of_targets, (tiles,),
                       {**shared, "targets": targets, "out": target_logits, "vocabulary": vocabulary},
                       {**flags, **tile}, **schedule),
                Launch(_read_split, (tiles, num_splits),
                       {**shared, **given, **partial, **sizes}, {**flags, **tops, **tile, "SPLIT": SPLIT}, **schedule),
                Launch(_join, (count,), {**partial_in, **given, **joined, **sizes},
                       {**tops, "PADDED_SPLITS": next_power_of_2(num_splits)}),
            ],
            out,
        )  # fmt: skip

    reference = staticmethod(readout.read_states)
    exact = staticmethod(exact_readout)
    inputs = staticmethod(lens_inputs)

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return by_rows(arguments, ["states", "target_token_ids"], Readout._fields)

    @staticmethod
    def rtol(name: str, case: Case) -> float | None:
        if name in ("top_token_ids", "target_rank"):
            is_final = case.is_exact or case.dtype == torch.float32  # 16 bits round near ties either way
            return 0.0 if is_final else None
        return 1e-5 if case.is_exact else {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[case.dtype]

    @staticmethod
    def work(arguments: Arguments) -> Work:
        states, unembedding = arguments["states"], arguments["unembedding"]
        return Work(size_in_bytes(states, unembedding), 2 * states.shape[0] * unembedding.numel())
