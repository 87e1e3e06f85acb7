"""Drafts by prompt lookup: proposes what followed the newest tokens earlier in the text. Runs no model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar
from weakref import WeakKeyDictionary

from cacheprobe.core.registry import register
from cacheprobe.drafters.base import DraftContext
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM


@register("drafters", "ngram")
@dataclass(frozen=True)
class NGram:
    """Finds the longest earlier occurrences of the newest tokens, and drafts their most frequent continuation, token by
    token.

    The text is prompt, output and the draft so far, so a draft can repeat itself. Among equally frequent continuations,
    the latest is chosen.
    Source: prompt lookup decoding (Saxena 2023), with the vote of SuffixDecoding (arXiv 2411.04975, section 4) in place
    of a single occurrence.  Twin: tests.twins.equivalence.ngram_draft_slowly, ==.
    """

    max_ngram: int = 8
    """Maximum number of newest tokens to search for."""
    min_ngram: int = 1
    """Minimum number of newest tokens that must be found; with fewer, no token is drafted."""
    length: int = 8
    """Draft tokens before each verification."""
    name: ClassVar[str] = "ngram"
    drafted_layers: ClassVar[int] = 0
    _indices: "WeakKeyDictionary[SequenceState, _Index]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"NGram needs 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")
        if self.length < 1:
            raise ValueError(f"NGram(length={self.length}) would draft nothing; give at least 1")

    def check(self, model: CachedLM) -> None:
        """Accepts every model: copying tokens works with every vocabulary."""

    def release(self, state: SequenceState) -> None:
        """Forgets the index of a request's text."""
        self._indices.pop(state, None)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns one list for each request: up to `length` draft tokens, or [] if the request already has unverified
        draft tokens."""
        return [[] if state.draft else self._draft(state) for state in states]

    def _draft(self, state: SequenceState) -> list[int]:
        text = list(state.token_ids)
        num_given = len(text)
        index = self._indices.setdefault(state, _Index())
        index.grow(text)
        drafted_ends: dict[int, list[int]] = {}
        for _ in range(self.length):
            newest = text[-1]
            token = self._vote(text, chain(index.ends_of[newest], drafted_ends.get(newest, ())))
            if token is None:
                break
            text.append(token)
            index.ends_of.setdefault(token, [])
            drafted_ends.setdefault(token, []).append(len(text))
        return text[num_given:]

    def _vote(self, text: Sequence[int], ends: Iterable[int]) -> int | None:
        """Returns the next token. ends: index after each occurrence of the newest token, ascending, including the
        newest itself."""
        longest = self.min_ngram
        votes: dict[int, tuple[int, int]] = {}
        for end in ends:
            if end == len(text):
                continue
            size = 1
            while size < self.max_ngram and size < end and text[end - 1 - size] == text[-1 - size]:
                size += 1
            if size > longest:
                longest, votes = size, {}
            if size == longest:
                votes[text[end]] = votes.get(text[end], (0, 0))[0] + 1, end
        return max(votes, key=votes.__getitem__) if votes else None


class _Index:
    """Positions of each token in a text that only grows."""

    def __init__(self) -> None:
        self.ends_of: dict[int, list[int]] = {}
        self.num_read = 0

    def grow(self, text: Sequence[int]) -> None:
        """Adds the tokens that the text has gained."""
        for end in range(self.num_read + 1, len(text) + 1):
            self.ends_of.setdefault(text[end - 1], []).append(end)
        self.num_read = len(text)
