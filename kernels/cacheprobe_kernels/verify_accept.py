"""Verdicts on all drafts of a verify pass, with commit and ledger, in one launch."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.ops import verdicts
from cacheprobe.ops.verdicts import BatchVerdicts
from cacheprobe_kernels.base import Arguments, Case, Kernel, Launch, Outcome, Plan, Variant, Work, one_by_one
from cacheprobe_kernels.base import next_power_of_2 as padded
from cacheprobe_kernels.verdict_cases import BY_ROW, WRITTEN, verdict_inputs

_FREE, _VERIFIED = tl.constexpr(verdicts.FREE), tl.constexpr(verdicts.VERIFIED)
_STOP, _LENGTH = (tl.constexpr(verdicts.FINISHES.index(name)) for name in ("stop", "length"))


@triton.jit
def _verify_accept(
    drafts, draft_lengths, targets, target_lengths, num_left, stop_token_ids, last_positions, rows, token_ids, codes,
    hidden, lengths, accepted_out, count_out, finish_out, committed_out,
    num_rows, capacity, num_places, longest, num_targets, num_stops, draft_stride, target_stride,
    BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One row by one warp, which reads the row's length before it writes it."""
    batch = tl.program_id(0)
    row, last_committed_position = tl.load(rows + batch), tl.load(last_positions + batch)
    is_row = (row >= 0) & (row < num_rows)
    length = tl.load(lengths + row, mask=is_row, other=-1)
    drafted, chosen, left = tl.load(draft_lengths + batch), tl.load(target_lengths + batch), tl.load(num_left + batch)
    is_taken = is_row & (last_committed_position >= 0) & (last_committed_position <= length) & (left >= 0)
    is_taken &= (drafted >= 0) & (drafted <= longest) & (drafted <= chosen)
    is_taken &= (chosen <= drafted + 1) & (chosen <= num_targets)

    place = tl.arange(0, BLOCK)
    draft = tl.load(drafts + batch * draft_stride + place, mask=is_taken & (place < drafted), other=-1)
    target = tl.load(targets + batch * target_stride + place, mask=is_taken & (place < chosen), other=-1)
    matches = (place < drafted) & (draft == target)
    accepted = tl.min(tl.where(matches, BLOCK, place), 0)  # the first place that does not match; BLOCK > drafted
    said = tl.where(place < accepted, draft, target)
    num_said = tl.minimum(tl.where(accepted < chosen, accepted + 1, accepted), left)
    stops = place < 0
    for i in range(num_stops):
        stop = tl.load(stop_token_ids + batch * num_stops + i)
        stops = stops | (said == stop)
    first_stop = tl.min(tl.where(stops & (place < num_said), place, BLOCK), 0)
    committed = tl.minimum(num_said, first_stop + 1)
    ran_out = tl.where(num_said >= left, _LENGTH, 0)
    finish = tl.where(first_stop < BLOCK, _STOP, ran_out)

    end = last_committed_position + committed
    is_taken &= (end <= capacity) & (end + 1 <= num_places)
    is_kept = place < committed
    tl.store(accepted_out + batch, tl.where(is_taken, accepted, -1).to(tl.int64))
    tl.store(count_out + batch, tl.where(is_taken, committed, -1).to(tl.int64))
    tl.store(finish_out + batch, tl.where(is_taken, finish, -1).to(tl.int64))
    shown = tl.where(is_taken & is_kept, said, -1)
    tl.store(committed_out + batch * num_targets + place, shown, mask=place < num_targets)
    tl.store(token_ids + row * num_places + last_committed_position + 1 + place, said, mask=is_taken & is_kept)
    for first in range(0, capacity, BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        beyond = is_taken & (slot >= last_committed_position) & (slot < capacity)
        code = tl.where(slot < end, _VERIFIED, _FREE).to(tl.uint8)
        tl.store(codes + row * capacity + slot, code, mask=beyond & ((slot < length) | (slot < end)))
        tl.store(hidden + row * capacity + slot, tl.full([BLOCK_S], 0, tl.int1), mask=beyond)
    tl.store(lengths + row, end, mask=is_taken)


@register("kernels", "verify_accept")
class VerifyAccept(Kernel):
    """Drafts [b k] against the verifier's choices [b k + 1]: accepted, committed, kept in the ledger; see the
    reference.

    Source: decode-verify-rollback of LLM-42 (arXiv 2601.17768), section 4.2.
    Twin: cacheprobe.ops.verdicts.apply_verdicts, ==.
    """

    name = "verify_accept"
    cases = (
        Case("ragged", torch.long, {"b": 12, "k": 5, "s": 40, "stops": 2}),
        Case("no-drafts", torch.long, {"b": 3, "k": 0, "s": 9, "stops": 1}),
        Case("no-stops", torch.long, {"b": 4, "k": 3, "s": 300, "stops": 0}),
    )
    full = Case("smollm2-135m", torch.long, {"b": 64, "k": 15, "s": 2048, "stops": 2})
    writes = WRITTEN
    because = "nothing is computed but whole numbers"

    @staticmethod
    def plan(
        drafts: Tensor, draft_lengths: Tensor, targets: Tensor, target_lengths: Tensor, num_left: Tensor,
        stop_token_ids: Tensor, last_positions: Tensor, rows: Tensor, token_ids: Tensor, codes: Tensor, hidden: Tensor,
        lengths: Tensor,
    ) -> Plan:  # fmt: skip
        if not (codes.is_contiguous() and hidden.is_contiguous() and token_ids.is_contiguous()):
            raise ValueError("codes, hidden slots and token_ids must be contiguous")
        (count, longest), (num_rows, capacity), width = drafts.shape, codes.shape, targets.shape[1]
        settled = BatchVerdicts(
            *(torch.empty(count, dtype=torch.long, device=drafts.device) for _ in range(3)),
            torch.empty(count, width, dtype=torch.long, device=drafts.device),
        )
        given = {"drafts": drafts, "draft_lengths": draft_lengths, "targets": targets, "target_lengths": target_lengths,
                 "num_left": num_left, "stop_token_ids": stop_token_ids.contiguous(), "last_positions": last_positions,
                 "rows": rows}  # fmt: skip
        kept = {"token_ids": token_ids, "codes": codes, "hidden": hidden, "lengths": lengths}
        names = ("accepted_out", "count_out", "finish_out", "committed_out")
        sizes = {"num_rows": num_rows, "capacity": capacity, "num_places": token_ids.shape[1], "longest": longest,
                 "num_targets": width, "num_stops": stop_token_ids.shape[1]}  # fmt: skip
        strides = {"draft_stride": drafts.stride(0), "target_stride": targets.stride(0)}
        arguments = {**given, **kept, **dict(zip(names, settled, strict=True)), **sizes, **strides}
        blocks = {"BLOCK": padded(max(width, longest + 1)), "BLOCK_S": 256}
        return Plan([Launch(_verify_accept, (count,), arguments, blocks, num_warps=1)], settled)

    reference = staticmethod(verdicts.apply_verdicts)
    inputs = staticmethod(verdict_inputs)

    @staticmethod
    def exact(**arguments: object) -> Outcome:
        return {}

    @staticmethod
    def variants(arguments: Arguments) -> Iterator[Variant]:
        return one_by_one(arguments, BY_ROW, WRITTEN)

    @staticmethod
    def work(arguments: Arguments) -> Work:
        return Work(2 * len(arguments["rows"]) * arguments["codes"].shape[1], 0)
