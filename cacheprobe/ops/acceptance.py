"""The accept rule: the longest prefix of the draft that the verifier would have chosen itself."""

from collections.abc import Sequence
from typing import NamedTuple


def num_accepted(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> int:
    """Length of the longest prefix of the draft that equals the verifier's own choices.

    Source: LLM-42 (arXiv 2601.17768), section 4.2.  Twin: tests.equivalence.num_accepted_slowly, ==.
    """
    n = 0
    while n < len(draft_token_ids) and draft_token_ids[n] == target_token_ids[n]:
        n += 1
    return n


class Ending(NamedTuple):
    """How many of some new tokens stay, and why the request ends there, if it does."""

    num_kept: int
    finish: str | None


def find_ending(token_ids: Sequence[int], stop_token_ids: Sequence[int], num_left: int) -> Ending:
    """Cut new tokens after the first stop token, and at the `num_left` tokens that the request may still commit."""
    for index, token_id in enumerate(token_ids[:num_left]):
        if token_id in stop_token_ids:
            return Ending(index + 1, "stop")
    return Ending(num_left, "length") if len(token_ids) >= num_left else Ending(len(token_ids), None)


def clip_draft(token_ids: Sequence[int], stop_token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
    """At most `limit` draft tokens, none after a stop token: nothing after it could be committed."""
    kept = tuple(token_ids)[: max(limit, 0)]
    for index, token_id in enumerate(kept):
        if token_id in stop_token_ids:
            return kept[: index + 1]
    return kept
