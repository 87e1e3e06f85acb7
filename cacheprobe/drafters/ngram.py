"""Defines NGram, a drafter by prompt lookup: it drafts what followed the newest tokens earlier in the text."""

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
    """Finds the longest earlier occurrences of the newest tokens, and drafts the token that followed them most often.

    Repeats this for each token of the draft. The text is prompt, output and the draft so far, so a draft can continue
    itself. Among equally frequent continuations, the latest is chosen. Runs no model.
    Source: prompt lookup decoding (Saxena 2023), with the vote of SuffixDecoding (arXiv 2411.04975, section 4) in place
    of a single occurrence.  Twin: tests.twins.equivalence.ngram_draft_slowly, ==.
    """

    max_ngram: int = 8
    """Maximum number of newest tokens to search for."""
    min_ngram: int = 1
    """Minimum number of newest tokens that must be found; with fewer, no token is drafted."""
    length: int = 8
    """Maximum number of tokens in a draft."""
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
        """Accepts every model, because copying tokens works with every vocabulary."""

    def release(self, state: SequenceState) -> None:
        """Deletes the stored index of a request's text."""
        self._indices.pop(state, None)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of up to `length` draft tokens for each request; [] if the request already has a draft."""
        return [[] if state.draft else self._draft(state) for state in states]

    def _draft(self, state: SequenceState) -> list[int]:
        """Returns a list of up to `length` draft tokens for one request, each chosen by `_vote` from the text before
        it."""
        text = list(state.token_ids)
        num_committed = len(text)
        index = self._indices.setdefault(state, _Index())
        index.grow(text)
        drafted_ends: dict[int, list[int]] = {}  # as _Index.ends_of, for the tokens of this draft
        for _ in range(self.length):
            newest = text[-1]
            token = self._vote(text, chain(index.ends_of[newest], drafted_ends.get(newest, ())))
            if token is None:
                break
            text.append(token)
            index.ends_of.setdefault(token, [])
            drafted_ends.setdefault(token, []).append(len(text))
        return text[num_committed:]

    def _vote(self, text: Sequence[int], ends: Iterable[int]) -> int | None:
        """Returns the token that most often follows the longest matches of the end of `text`; None without a match.
        ends: the index after each occurrence of the newest token, ascending."""
        longest = self.min_ngram
        votes: dict[int, tuple[int, int]] = {}
        for end in ends:
            if end == len(text):
                continue
            matched = 1
            while matched < self.max_ngram and matched < end and text[end - 1 - matched] == text[-1 - matched]:
                matched += 1
            if matched > longest:
                longest, votes = matched, {}
            if matched == longest:
                votes[text[end]] = votes.get(text[end], (0, 0))[0] + 1, end  # count, then the latest wins
        return max(votes, key=votes.__getitem__) if votes else None


class _Index:
    """Maps each token of a text to the indices after its occurrences (`ends_of`). The text may only grow."""

    def __init__(self) -> None:
        self.ends_of: dict[int, list[int]] = {}
        self.num_read = 0

    def grow(self, text: Sequence[int]) -> None:
        """Adds the tokens that the text has gained since the last call."""
        for end in range(self.num_read + 1, len(text) + 1):
            self.ends_of.setdefault(text[end - 1], []).append(end)
        self.num_read = len(text)
