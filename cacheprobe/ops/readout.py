"""Computes statistics of vocabulary logits: top tokens, entropy, and the rank and log-probability of given tokens."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.ops.equality import ordered_bits
from cacheprobe.ops.references import project, rms_norm

_ROWS_AT_ONCE, _IDS_AT_ONCE = 60, 4096
"""Logit rows and token ids reduced together: few enough to stay in the shared cache, and enough that starting each
parallel pass costs little."""

BLOCK = 128
"""Number of token ids whose maximum is computed first when the largest logits are searched."""


class Readout(NamedTuple):
    """Holds statistics of n distributions over the vocabulary: top tokens, entropy, and the target token's rank and
    log-probability."""

    top_token_ids: Tensor
    """[n, k] token ids, best first; equal logits in the order of their ids."""
    top_logprob_nats: Tensor
    """[n, k]"""
    entropy_nats: Tensor
    """[n]"""
    target_rank: Tensor
    """[n] number of tokens ranked before the target: larger logits, and equal ones with a lower id. -1 without a
    target."""
    target_logprob_nats: Tensor
    """[n] NaN without a target."""


def read_logits(logits: Float[Tensor, "n v"], target_token_ids: Int[Tensor, "n"], top_k: int) -> Readout:
    """Returns the Readout (top tokens, entropy, the targets' ranks and log-probabilities) of logits [n, v] in the
    model's own dtype.

    target_token_ids: [n], -1 for no target.  Sums are computed in float32; for float64 logits in float64, then rounded
    to float32.
    Source: logit lens (nostalgebraist 2020) statistics; entropy and rank as in Belrose et al. 2023, section 3.
    Twin: tests.twins.equivalence.read_logits_slowly: ids and ranks ==, numbers close(1e-5) since sums are reordered.
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
    """Returns the Readout of states [n, m] after a final RMSNorm and an unembedding: top tokens, entropy, the targets'
    ranks and log-probabilities.

    norm_weight: None for states that are already normalised.  eps: of the norm.  bias: of the unembedding.
    Source: logit lens (nostalgebraist 2020).  Twin: the two steps by themselves (tests.ops.test_plain_ops), bitwise.
    """
    read = states if norm_weight is None else rms_norm(states, norm_weight, eps)
    return read_logits(project(read, unembedding, bias), target_token_ids, top_k)


def _read_chunk(logits: Tensor, targets: Tensor, top_k: int) -> Readout:
    """Returns the Readout of a few rows of logits [n, v], in one pass over tiles of token ids."""
    rows, width = logits.shape
    is_cpu = logits.device.type == "cpu"
    size = -(-min(_IDS_AT_ONCE if is_cpu else width, width) // BLOCK) * BLOCK
    has_target = targets >= 0
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    target_values = logits.gather(1, targets.clamp(min=0)[:, None]).to(wide)
    best = target_values.new_full((rows, 1), torch.finfo(wide).min)
    total, weighted = torch.zeros_like(best), torch.zeros_like(best)
    before = torch.zeros_like(targets)
    values, weights = (target_values.new_empty(rows, size) for _ in range(2))
    tops = target_values.new_empty(rows, -(-width // BLOCK))

    for start in range(0, width, size):
        end = min(start + size, width)
        if end - start < size:
            size = -(-(end - start) // BLOCK) * BLOCK
            values, weights = (values.new_full((rows, size), -torch.inf) for _ in range(2))
        values[:, : end - start] = logits[:, start:end]
        blocks = tops[:, start // BLOCK : -(-end // BLOCK)]
        torch.amax(values.view(rows, -1, BLOCK), -1, out=blocks)
        if bool(has_target.any()):
            before += _num_before(values, weights, target_values, targets - start)

        larger = torch.maximum(best, blocks.amax(-1, keepdim=True))
        shift, best = best - larger, larger
        torch.exp(values.sub_(best), out=weights)
        tile_total = weights.sum(-1, keepdim=True)
        tile_weighted = weights.mul_(values).sum(-1, keepdim=True)
        if bool(tile_weighted.isnan().any()):  # 0 times -inf: a token that cannot occur, which adds nothing to the sum
            tile_weighted = weights.nan_to_num_(nan=0.0).sum(-1, keepdim=True)
        rescale = shift.exp()
        weighted = (weighted + total * shift) * rescale + tile_weighted
        total = total * rescale + tile_total

    logsumexp = total.log() + best
    top_values, top_ids = best_of_blocks(logits, tops, top_k)
    return Readout(
        top_ids,
        (top_values.to(wide) - logsumexp).float(),
        (total.log() - weighted / total)[:, 0].float(),
        torch.where(has_target, before, -1),
        torch.where(has_target, (target_values - logsumexp)[:, 0], torch.nan).float(),
    )


def _num_before(values: Tensor, scratch: Tensor, target_values: Tensor, offsets: Tensor) -> Tensor:
    """Returns [n]: how many values of one tile [n, w] of logits rank before the target, whose index relative to the
    tile is `offsets` [n]. Overwrites `scratch`."""
    width = values.shape[1]
    lower = torch.nextafter(target_values, torch.full_like(target_values, -torch.inf))
    limits = torch.where((offsets >= width)[:, None], lower, target_values)
    count = torch.gt(values, limits, out=scratch).sum(-1).long()  # whole numbers, exact in float32 up to 2^24
    is_lowest = target_values[:, 0].isneginf() & (offsets >= width)  # `lower` cannot lie below -inf
    inside = ((offsets >= 0) & (offsets < width)).nonzero()[:, 0]
    if len(inside):
        ids = torch.arange(width, device=values.device, dtype=torch.int32)
        equal = (values[inside] == target_values[inside]) & (ids < offsets[inside, None].int())
        count[inside] += equal.view(torch.int8).sum(-1, dtype=torch.int32)  # a sum of bits would widen each to 64
    return count.masked_fill_(is_lowest, width)


def best_of_blocks(values: Tensor, tops: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest of values [n, v] (all, if v is smaller) and their ids, [n, k] each; equal values in the
    order of their ids. tops: the maximum of every BLOCK consecutive values.

    The k largest values lie in the k blocks with the largest maxima, so only the values of these blocks are sorted.
    Twin: tests.twins.equivalence.lowest_topk_slowly, ==.
    """
    width = values.shape[1]
    k = min(k, width)
    best = _first_largest(tops, min(k, tops.shape[1]))
    blocks = best.sort(dim=1).values  # ids ascend again, so that a lower index means a lower id
    ids = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=values.device)).flatten(1)
    candidates = values.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, -torch.inf)
    order = _first_largest(candidates, k)
    return candidates.gather(1, order), ids.gather(1, order)


def _first_largest(values: Tensor, k: int) -> Tensor:
    """Returns [n, k]: the column indices of the k largest values of each row; of equal values, the lowest index."""
    if values.dtype == torch.float64:
        return values.argsort(dim=1, descending=True, stable=True)[:, :k]
    ordered = (ordered_bits(values.float()) << 32) - torch.arange(values.shape[1], device=values.device)
    return ordered.topk(k, dim=1).indices
