"""Computes, in plain torch, the operations that have a Triton kernel: RMSNorm and linear projection of a model,
attention over a preallocated cache, writes to the cache, and copies of captured states."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import linear


def rms_norm(values: Float[Tensor, "n m"], weight: Float[Tensor, "m"], eps: float) -> Float[Tensor, "n m"]:
    """Returns values / sqrt(mean(values^2) + eps) * weight, for each vector of `values` [n, m].

    The mean square is computed in float32 (float64 for float64 input), the product with the weight in the dtype of
    `values`.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467), equation 4.
    Twin: LlamaRMSNorm of transformers, bitwise: tests.ops.test_plain_ops.
    """
    wide = values if values.dtype == torch.float64 else values.float()
    scaled = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight * scaled.to(values.dtype)


def project(
    values: Float[Tensor, "n i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None
) -> Float[Tensor, "n o"]:
    """Returns values weight^T + bias, as a tensor [n, o] in the dtype of `values`."""
    return linear(values, weight, bias)


def pack_rows(states: Float[Tensor, "b t m"], rows: Int[Tensor, "n"], out: Float[Tensor, "n m"]) -> None:
    """Writes the state vectors numbered `rows` to `out`, in place, in the dtype of `out`. Number i * t + slot is token
    slot `slot` of batch index i.

    Numbers are rounded to nearest, ties to even. A line of `out` whose number lies outside the source stays unchanged.
    Twin: tests.twins.kernels_slowly.pack_rows_slowly, ==.
    """
    flat = states.flatten(0, 1)
    is_row = (rows >= 0) & (rows < len(flat))
    out[is_row] = flat[rows[is_row]].to(out.dtype)


def store_kv(
    k: Float[Tensor, "b g t dk"],
    v: Float[Tensor, "b g t dv"],
    keys: Float[Tensor, "r g s dk"],
    values: Float[Tensor, "r g s dv"],
    rows: Int[Tensor, "b"],
    starts: Int[Tensor, "b"],
) -> None:
    """Writes the keys and values of token slot t of batch index b to slot starts[b] + t of cache row rows[b], in place.

    keys, values: of one layer.  rows: each cache row at most once. A batch index whose cache row or slots lie outside
    the cache is left out: on a GPU, an error would have to wait for the device.
    Twin: kvcache.staged.StagedCache.store without a `writer`, == (tests.kvcache.test_cache_rows).
    """
    width, (num_rows, _, capacity, _) = k.shape[2], keys.shape
    for b, (row, start) in enumerate(zip(rows.tolist(), starts.tolist(), strict=True)):
        if 0 <= row < num_rows and 0 <= start <= capacity - width:
            keys[row, :, start : start + width] = k[b]
            values[row, :, start : start + width] = v[b]


def cached_attention(
    q: Float[Tensor, "b h t dk"],
    keys: Float[Tensor, "r g s dk"],
    values: Float[Tensor, "r g s dv"],
    rows: Int[Tensor, "b"],
    positions: Int[Tensor, "b t"],
    scale: float,
    hidden: Bool[Tensor, "r g s"] | None = None,
    window: int | None = None,
) -> Float[Tensor, "b h t dv"]:
    """Returns softmax(q k^T scale) v, [b, h, t, dv], of each query over its cache row; each of g key heads serves h / g
    query heads.

    rows: cache row of each batch index.  positions: absolute, of each query; the query's own slot must be written.
    hidden: slots of each key head that only the query at that slot's position sees.  window: how many positions a
    query sees, including its own.
    Sums are computed in float32. Masked slots must be finite, as KVCache guarantees.
    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.1; grouped heads, Ainslie et al. 2023 (2305.13245).
    Twin: the fused attention of torch over the same cache, close (tests.ops.test_plain_ops).
    """
    slots = torch.arange(keys.shape[2], device=q.device)
    query_slots = positions[..., None]
    is_seen = (slots <= query_slots)[:, None]
    groups = q.shape[1] // keys.shape[1]
    if window is not None:
        is_seen &= (slots > query_slots - window)[:, None]
    if hidden is not None:
        is_hidden = hidden[rows].repeat_interleave(groups, 1)[:, :, None]
        is_seen = is_seen & (~is_hidden | (slots == query_slots)[:, None])
    k = keys[rows].float().repeat_interleave(groups, 1)
    v = values[rows].float().repeat_interleave(groups, 1)
    scores = (q.float() @ k.mT) * scale
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return (weights @ v).to(q.dtype)
