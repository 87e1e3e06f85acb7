"""Computes attention over a preallocated cache in plain torch: every query sees the slots up to its own position."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
    Twin: the fused attention of models.fast.functional, close (tests.ops.test_plain_ops).
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
