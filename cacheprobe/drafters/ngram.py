"""Prompt lookup as a drafter: what followed the newest tokens when they last stood in the text. Runs no model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

from cacheprobe.cache.sequence import SequenceState
from cacheprobe.drafters.base import DraftContext
from cacheprobe.models.base import CachedLM
from cacheprobe.registry import register


@register("drafters", "ngram")
@dataclass(frozen=True)
class NGram:
    """Copies the continuation of an earlier occurrence of the newest tokens, once for each verification.

    The longest run of newest tokens that stands earlier in prompt or output decides; of its occurrences the latest one
    that has `length` tokens behind it, or else the latest. A copy that reaches the end of the text goes on over its own
    tokens: text that repeats is drafted as repeating.
    Source: prompt lookup decoding (Saxena 2023), as in transformers' PromptLookupCandidateGenerator, which takes the
    earliest occurrence and stops at the end of the text.  Twin: tests.equivalence.ngram_draft_slowly, ==.
    """

    max_ngram: int = 3
    """Newest tokens to look for, at most."""
    min_ngram: int = 1
    """Newest tokens that must be found; fewer draft nothing."""
    length: int = 8
    """Candidates before each verification."""
    name: ClassVar[str] = "ngram"
    _indices: "WeakKeyDictionary[SequenceState, _Index]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"NGram needs 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")
        if self.length < 1:
            raise ValueError(f"NGram(length={self.length}) would draft nothing; give at least 1")

    def check(self, model: CachedLM) -> None:
        """Every model's own tokens can be copied."""

    def release(self, state: SequenceState) -> None:
        self._indices.pop(state, None)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        return [[] if state.draft else self._draft(state) for state in states]

    def _draft(self, state: SequenceState) -> list[int]:
        text = state.token_ids
        index = self._indices.setdefault(state, _Index())
        index.grow(text)
        start = self._continuation(text, index.ends_of[text[-1]])
        if start is None:
            return []
        copied = text[start : start + self.length]
        period = len(text) - start
        while len(copied) < self.length:
            copied.append(copied[-period])
        return copied

    def _continuation(self, text: Sequence[int], ends: Sequence[int]) -> int | None:
        """Where the text to copy starts; ends: after each occurrence of the newest token, itself included."""
        longest, found, has_room = self.min_ngram - 1, None, False
        for end in reversed(ends[:-1]):  # the latest first
            size = 1
            while size < self.max_ngram and size < end and text[end - 1 - size] == text[-1 - size]:
                size += 1
            fits = end + self.length <= len(text)
            if size > longest or (size == longest and found is not None and fits and not has_room):
                longest, found, has_room = size, end, fits
            if has_room and longest == self.max_ngram:
                break
        return found


class _Index:
    """Where each token of a text stands; the text only grows."""

    def __init__(self) -> None:
        self.ends_of: dict[int, list[int]] = {}
        self.num_read = 0

    def grow(self, text: Sequence[int]) -> None:
        for end in range(self.num_read + 1, len(text) + 1):
            self.ends_of.setdefault(text[end - 1], []).append(end)
        self.num_read = len(text)
