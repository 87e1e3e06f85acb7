"""The accept rule (keep the longest draft prefix that the verifier would choose itself), and the rule where output
ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


def num_accepted(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> int:
    """Returns the length of the longest prefix of the draft that equals the verifier's own choices.

    Source: LLM-42 (arXiv 2601.17768), section 4.2.  Twin: tests.twins.equivalence.num_accepted_slowly, ==.
    """
    n = 0
    while n < len(draft_token_ids) and draft_token_ids[n] == target_token_ids[n]:
        n += 1
    return n


@dataclass(frozen=True)
class StopRule:
    """Stop tokens and stop texts. The rule depends only on the generated tokens, so a rollback has nothing to undo."""

    token_ids: frozenset[int]
    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def ends(self, generated: Sequence[int]) -> bool:
        """Returns whether output ends with the last of these generated tokens: a stop token, or the last part of a stop
        text.

        A stop text may span tokens and windows, so the whole output is decoded.
        """
        if generated[-1] in self.token_ids:
            return True
        return bool(self.texts) and any(text in self.decode(generated) for text in self.texts)


class Ending(NamedTuple):
    """How many of some new tokens are kept, and why the request ends there (None if it does not end)."""

    num_kept: int
    finish: str | None


def find_ending(generated: Sequence[int], token_ids: Sequence[int], rule: StopRule, num_left: int) -> Ending:
    """Cuts new tokens, which follow `generated`, after the first ending and at the `num_left` tokens still allowed."""
    said = list(generated)
    for index, token_id in enumerate(token_ids[:num_left]):
        said.append(token_id)
        if rule.ends(said):
            return Ending(index + 1, "stop")
    return Ending(num_left, "length") if len(token_ids) >= num_left else Ending(len(token_ids), None)


def clip_draft(generated: Sequence[int], token_ids: Sequence[int], rule: StopRule, limit: int) -> tuple[int, ...]:
    """Returns at most `limit` draft tokens and none after an ending, because such tokens could never be committed."""
    kept = tuple(token_ids)[: max(limit, 0)]
    return kept[: find_ending(generated, kept, rule, len(kept) + 1).num_kept]
