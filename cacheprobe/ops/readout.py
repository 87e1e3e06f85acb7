"""Reading vocabulary logits: top tokens, log-sum-exp, entropy, and the rank of given tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.ops.plain import project, rms_norm

_ROWS_AT_ONCE = 60
"""Rows reduced together: few enough for the shared cache, enough that starting each parallel pass does not show."""

_BLOCK = 128
"""Ids whose largest value is taken at once, in looking for the largest of all."""


class Readout(NamedTuple):
    """What a distribution over the vocabulary says, row by row."""

    top_token_ids: Tensor
    """[n, k] best first; equal logits in the order of their ids."""
    top_logprob_nats: Tensor
    """[n, k]"""
    entropy_nats: Tensor
    """[n]"""
    target_rank: Tensor
    """[n] tokens before the target: larger logits, and equal ones with a lower id. -1 where there is no target."""
    target_logprob_nats: Tensor
    """[n] NaN where there is no target."""


def read_logits(logits: Float[Tensor, "n v"], target_token_ids: Int[Tensor, "n"], top_k: int) -> Readout:
    """Top tokens, entropy and the targets' ranks, over logits in the model's own dtype.

    logits: [n, v].  target_token_ids: [n], -1 for none.  Sums are taken in float32.
    Source: logit lens (nostalgebraist 2020) statistics; entropy and rank as in Belrose et al. 2023, section 3.
    Twin: tests.equivalence.read_logits_slowly: ids and ranks ==, numbers close(1e-5) since sums are reordered.
    """
    parts = [
        _read_chunk(logits[i : i + _ROWS_AT_ONCE], target_token_ids[i : i + _ROWS_AT_ONCE], top_k)
        for i in range(0, logits.shape[0], _ROWS_AT_ONCE)
    ]
    return Readout(*(torch.cat(column) for column in zip(*parts, strict=True)))


def read_states(
    states: Float[Tensor, "n m"],
    norm_weight: Float[Tensor, "m"] | None,
    eps: float,
    unembedding: Float[Tensor, "v m"],
    target_token_ids: Int[Tensor, "n"],
    top_k: int,
    bias: Float[Tensor, "v"] | None = None,
) -> Readout:
    """What states say through a final RMSNorm and an unembedding: `read_logits` of their logits.

    norm_weight: None for states that are normalised already.  eps: of the norm.  bias: of the unembedding.
    Source: logit lens (nostalgebraist 2020).  Twin: the two steps by themselves (tests.test_plain_ops), bitwise.
    """
    read = states if norm_weight is None else rms_norm(states, norm_weight, eps)
    return read_logits(project(read, unembedding, bias), target_token_ids, top_k)


def _read_chunk(logits: Tensor, targets: Tensor, top_k: int) -> Readout:
    values = logits.float()
    top_values, top_ids = lowest_topk(values, top_k)
    best = top_values[:, :1]
    weights = (values - best).exp_()
    total = weights.sum(-1, keepdim=True)
    logsumexp = total.log() + best
    weighted = weights.mul_(values)
    mean = weighted.sum(-1, keepdim=True) / total
    if bool(mean.isnan().any()):  # 0 times -inf: a token that cannot occur, which adds nothing to the mean
        mean = weighted.nan_to_num_(nan=0.0).sum(-1, keepdim=True) / total

    has_target = targets >= 0
    target_values = values.gather(1, targets.clamp(min=0)[:, None])
    ids = torch.arange(values.shape[1], device=values.device)
    before = _count(values > target_values)
    ties = _count(values == target_values) > 1
    if bool(ties.any()):
        equal_before = (values[ties] == target_values[ties]) & (ids < targets[ties, None])
        before[ties] = before[ties] + equal_before.sum(-1)
    return Readout(
        top_ids,
        top_values - logsumexp,
        (logsumexp - mean)[:, 0],
        torch.where(has_target, before, -1),
        torch.where(has_target, (target_values - logsumexp)[:, 0], torch.nan),
    )


def lowest_topk(values: Float[Tensor, "n v"], k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their ids; of equal values the lowest id first (`topk` promises no order).

    Ids fall into blocks, and the k largest values lie in the k blocks whose largest values are the largest, the first
    of those that are equal: each block before another holds a value that comes before all of the other's. So each row
    is read once, and few of its values are sorted.
    Twin: tests.equivalence.lowest_topk_slowly, ==.
    """
    width = values.shape[1]
    k = min(k, width)
    whole = width // _BLOCK * _BLOCK
    tops = [values[:, :whole].unflatten(1, (-1, _BLOCK)).amax(-1)] if whole else []
    if whole < width:
        tops.append(values[:, whole:].amax(-1, keepdim=True))
    best = torch.cat(tops, dim=1).sort(dim=1, descending=True, stable=True).indices[:, :k]
    blocks = best.sort(dim=1).values  # ids ascend again, for the second stable sort
    ids = (blocks[:, :, None] * _BLOCK + torch.arange(_BLOCK, device=values.device)).flatten(1)
    candidates = values.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, -torch.inf)
    order = candidates.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return candidates.gather(1, order), ids.gather(1, order)


def _count(mask: Tensor) -> Tensor:
    """[n] how many of each row of a mask [n, v] are set; a sum of bits would widen each to 64."""
    return mask.view(torch.int8).sum(-1, dtype=torch.int32).long()
