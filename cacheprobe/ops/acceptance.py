"""Finds how many draft tokens a verifier accepts by equality, and at which generated token a request ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from cacheprobe.core.tokens import TextWindow


def num_accepted(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> int:
    """Returns the length of the longest prefix of the draft that equals the verifier's own tokens.

    Source: LLM-42 (arXiv 2601.17768), section 4.2.  Twin: tests.twins.equivalence.num_accepted_slowly, ==.
    """
    n = 0
    while n < len(draft_token_ids) and draft_token_ids[n] == target_token_ids[n]:
        n += 1
    return n


@dataclass(frozen=True)
class StopRule:
    """Holds the stop tokens and stop texts of a request; its answers do not depend on earlier calls."""

    token_ids: frozenset[int]
    texts: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    @cached_property
    def _window(self) -> TextWindow:
        """Window that holds more text than the longest stop text, before the newest token."""
        most_bytes = max(len(text.encode()) for text in self.texts)
        return TextWindow(self.decode, num_chars=max(map(len, self.texts)), num_tokens=most_bytes)

    def ends(self, generated: Sequence[int], newer: Sequence[int] = ()) -> bool:
        """Returns whether the tokens `generated` and then `newer`, together at least one, end the request: the last one
        is a stop token, or the text of all contains a stop text, and that of all but the last does not.

        A stop text may span tokens and windows. Decodes the newest tokens alone, as many as the longest stop text needs
        and at least 64.
        Twin: tests.twins.equivalence.ends_slowly, ==.
        """
        newest = newer or generated[-1:]
        if newest[-1] in self.token_ids:
            return True
        if not self.texts:
            return False
        before = generated if newer else generated[:-1]
        said = self.decode([*before[self._window.start(before) :], *newest])
        return any(text in said for text in self.texts)


class Ending(NamedTuple):
    """Holds the number of new tokens that a request keeps, and why it ends after them: stop, length, or None."""

    num_kept: int
    finish: str | None


def find_ending(generated: Sequence[int], token_ids: Sequence[int], rule: StopRule, num_left: int) -> Ending:
    """Returns the Ending for the new tokens `token_ids`, which follow `generated`: tokens after the first stop, and
    tokens beyond the `num_left` still allowed, are not kept."""
    for index in range(min(len(token_ids), num_left)):
        if rule.ends(generated, token_ids[: index + 1]):
            return Ending(index + 1, "stop")
    return Ending(num_left, "length") if len(token_ids) >= num_left else Ending(len(token_ids), None)


def clip_draft(generated: Sequence[int], token_ids: Sequence[int], rule: StopRule, limit: int) -> tuple[int, ...]:
    """Returns the first of the draft tokens, as a tuple: at most `limit`, and none after a token that ends the request.
    Later ones could not be committed.

    generated: the request's earlier tokens, committed and then drafted, without the prompt.
    """
    clipped = tuple(token_ids)[: max(limit, 0)]
    num_left = len(clipped) + 1  # more than there are, so that only a stop cuts them
    return clipped[: find_ending(generated, clipped, rule, num_left).num_kept]
