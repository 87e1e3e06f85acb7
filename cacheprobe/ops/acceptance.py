"""The accept rule: the longest prefix of the draft that the verifier would choose itself. And where output ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


def num_accepted(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> int:
    """Length of the longest prefix of the draft that equals the verifier's own choices.

    Source: LLM-42 (arXiv 2601.17768), section 4.2.  Twin: tests.equivalence.num_accepted_slowly, ==.
    """
    n = 0
    while n < len(draft_token_ids) and draft_token_ids[n] == target_token_ids[n]:
        n += 1
    return n


@dataclass(frozen=True)
class StopRule:
    """Stop tokens and stop texts: a function of the generated tokens alone, so that no rollback has to undo it."""

    token_ids: frozenset[int]
    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def ends(self, generated: Sequence[int]) -> bool:
        """Whether output ends with the last of these generated tokens: a stop token, or a stop text's last part.

        A text may span tokens and windows; the whole output is decoded, since tokens have no text of their own.
        """
        if generated[-1] in self.token_ids:
            return True
        return bool(self.texts) and any(text in self.decode(generated) for text in self.texts)


class Ending(NamedTuple):
    """How many of some new tokens stay, and why the request ends there, if it does."""

    num_kept: int
    finish: str | None


def find_ending(generated: Sequence[int], token_ids: Sequence[int], rule: StopRule, num_left: int) -> Ending:
    """Cut new tokens, which follow those `generated`, after the first ending and at the `num_left` still allowed."""
    said = list(generated)
    for index, token_id in enumerate(token_ids[:num_left]):
        said.append(token_id)
        if rule.ends(said):
            return Ending(index + 1, "stop")
    return Ending(num_left, "length") if len(token_ids) >= num_left else Ending(len(token_ids), None)


def clip_draft(generated: Sequence[int], token_ids: Sequence[int], rule: StopRule, limit: int) -> tuple[int, ...]:
    """At most `limit` draft tokens, none after an ending: nothing after it could be committed."""
    kept = tuple(token_ids)[: max(limit, 0)]
    return kept[: find_ending(generated, kept, rule, len(kept) + 1).num_kept]
