"""Computes verdicts on a batch of drafts and updates the cache's ledger, on plain tensors, as the reference of a GPU
kernel.

The engine does not call this file; its verdicts are made in `engine.committer`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from cacheprobe.core.records import PROVENANCES
from cacheprobe.ops.acceptance import StopRule, find_ending, num_accepted
from cacheprobe.ops.cache_rows import FREE

VERIFIED = PROVENANCES.index("verified")
FINISHES = (None, "stop", "length")
"""Finish reasons, indexed by the codes in `BatchVerdicts.finish`."""


class BatchVerdicts(NamedTuple):
    """Holds the verdicts on a batch of drafts, one for each batch index. All numbers are -1 for a batch index with
    invalid arguments, of which nothing was changed."""

    num_accepted: Tensor
    """[b] length of the longest prefix of the draft that the verifier would have chosen itself."""
    num_committed: Tensor
    """[b] tokens committed: the accepted ones and the verifier's next, or fewer if the request ended."""
    finish: Tensor
    """[b] index into FINISHES: why the request ended, or 0 if it goes on."""
    committed: Tensor
    """[b, k + 1] the committed tokens, followed by -1."""


def apply_verdicts(
    drafts: Int[Tensor, "b k"],
    draft_lengths: Int[Tensor, "b"],
    targets: Int[Tensor, "b k1"],
    target_lengths: Int[Tensor, "b"],
    num_left: Int[Tensor, "b"],
    stop_token_ids: Int[Tensor, "b n"],
    last_positions: Int[Tensor, "b"],
    rows: Int[Tensor, "b"],
    token_ids: Int[Tensor, "r c"],
    codes: UInt8[Tensor, "r s"],
    hidden: Bool[Tensor, "r s"],
    lengths: Int[Tensor, "r"],
) -> BatchVerdicts:
    """Compares drafts with the verifier's own tokens, commits tokens and updates the ledger, for each batch index of a
    verify pass; returns BatchVerdicts.

    drafts, draft_lengths: draft tokens, of which the first draft_lengths[b] count.  targets, target_lengths: the
    verifier's own tokens, one more than draft tokens, or as many if the last draft token ends the request.  num_left:
    tokens that may still be committed.  stop_token_ids: -1 for none; stop texts are not supported.
    last_positions: position of the newest committed token, whose slot the pass has written.
    Changes in place: token_ids[row] by position, from the last committed position + 1 on; the ledger of the row, in
    which the slots from last_positions[b] up to the new newest token's become verified, later ones free, and none stays
    hidden; lengths.  rows: each cache row at most once.
    Source: decode-verify-rollback of LLM-42 (arXiv 2601.17768), section 4.2.
    Twin: engine.committer.Committer.verify_draft and apply_verdict on a KVCache, == (tests.kvcache.test_cache_rows).
    """
    count, width = targets.shape
    out = torch.full((3, count), -1, dtype=torch.long, device=drafts.device)
    committed = torch.full((count, width), -1, dtype=torch.long, device=drafts.device)
    for b, (row, last_committed_position, num_drafted, num_targets, left) in enumerate(
        zip(*(one.tolist() for one in (rows, last_positions, draft_lengths, target_lengths, num_left)), strict=True)
    ):
        if not (0 <= row < len(lengths) and 0 <= last_committed_position <= int(lengths[row]) and left >= 0):
            continue
        if not (0 <= num_drafted <= min(drafts.shape[1], num_targets) and num_targets <= min(num_drafted + 1, width)):
            continue
        draft, chosen = drafts[b, :num_drafted].tolist(), targets[b, :num_targets].tolist()
        stops = frozenset(token for token in stop_token_ids[b].tolist() if token >= 0)
        n = num_accepted(draft, chosen)
        decided = draft[:n] + chosen[n : n + 1]
        ending = find_ending((), decided, StopRule(stops, (), str), left)
        end = last_committed_position + ending.num_kept
        if end > codes.shape[1] or end + 1 > token_ids.shape[1]:
            continue
        kept = torch.tensor(decided[: ending.num_kept], dtype=torch.long, device=drafts.device)
        out[:, b] = torch.tensor([n, ending.num_kept, FINISHES.index(ending.finish)])
        committed[b, : len(kept)] = kept
        token_ids[row, last_committed_position + 1 : end + 1] = kept
        hidden[row, last_committed_position:] = False
        codes[row, last_committed_position : int(lengths[row])] = FREE
        codes[row, last_committed_position:end] = VERIFIED
        lengths[row] = end
    return BatchVerdicts(out[0], out[1], out[2], committed)
