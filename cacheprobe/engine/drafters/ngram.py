"""Defines NGram, a drafter by prompt lookup: it drafts what followed the newest tokens earlier in the text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

from cacheprobe.core.registry import register
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.sequence import SequenceState


@register("drafters", "ngram")
@dataclass(frozen=True)
class NGram(Drafter):
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
    always_drafts: ClassVar[bool] = False
    drafted_layers: ClassVar[int] = 0
    _indices: "WeakKeyDictionary[SequenceState, _Index]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"NGram needs 1 <= min_ngram <= max_ngram, got {self.min_ngram} and {self.max_ngram}")
        if self.length < 1:
            raise ValueError(f"NGram(length={self.length}) would draft nothing; give at least 1")

    def release(self, state: SequenceState) -> None:
        """Deletes the stored index of a request's text."""
        self._indices.pop(state, None)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of up to `length` draft tokens for each request; [] if the request already has a draft."""
        return [[] if state.draft else self._draft(state) for state in states]

    def _draft(self, state: SequenceState) -> list[int]:
        """Returns up to `length` draft tokens of one request: each is what most often followed the newest tokens before
        it. Fewer if the newest tokens have not occurred before."""
        if (index := self._indices.get(state)) is None:
            index = self._indices[state] = _Index(self.min_ngram, self.max_ngram)
        for end in range(index.num_read + 1, len(state.token_ids) + 1):
            index.add(state.token_ids[max(end - 1 - self.max_ngram, 0) : end])
        with_draft = _Index(self.min_ngram, self.max_ngram, index)
        newest, draft = state.token_ids[-self.max_ngram - 1 :], []
        while len(draft) < self.length and (token := with_draft.vote(newest)) is not None:
            draft.append(token)
            newest = [*newest[-self.max_ngram :], token]
            with_draft.add(newest)
        return draft


class _Index:
    """Counts which token followed each n-gram (run of n tokens) of a text, and keeps the winner of the vote.

    A vote takes as long after a long text as after a short one.
    """

    def __init__(self, min_ngram: int, max_ngram: int, earlier: "_Index | None" = None) -> None:
        """Creates an empty index. earlier: the index of the text that comes before; it is read, and not changed."""
        self.sizes, self.earlier = range(max_ngram, min_ngram - 1, -1), earlier
        self.num_read = earlier.num_read if earlier is not None else 0
        """Number of tokens added so far, with those of the earlier index."""
        self.counts: dict[tuple[int, ...], int] = {}
        """How often each n-gram and the token after it occur, keyed by both."""
        self.winners: dict[tuple[int, ...], tuple[int, int, int]] = {}
        """(count, place of the last occurrence, token) of the token that follows each n-gram most often."""

    def add(self, newest: Sequence[int]) -> None:
        """Adds the next token of the text. newest: that token, last, and the tokens before it, max_ngram or all."""
        self.num_read += 1
        token = newest[-1]
        for size in self.sizes:
            if size < len(newest):
                followed = tuple(newest[-1 - size :])
                count = self.counts[followed] = self._count(followed) + 1
                mine = (count, self.num_read, token)
                self.winners[followed[:-1]] = max(mine, self.winners.get(followed[:-1], mine))

    def vote(self, newest: Sequence[int]) -> int | None:
        """Returns the token that most often followed the longest known n-gram at the end of `newest`; of tokens that
        followed equally often, the one that did so last. Returns None if none of these n-grams is known."""
        for size in self.sizes:
            ngram = tuple(newest[-size:])
            known = [index.winners[ngram] for index in (self, self.earlier) if index and ngram in index.winners]
            if size <= len(newest) and known:
                return max(known)[2]
        return None

    def _count(self, followed: tuple[int, ...]) -> int:
        """Returns how often an n-gram and the token after it occurred, in the earlier index too."""
        before = self.earlier.counts.get(followed, 0) if self.earlier is not None else 0
        return self.counts.get(followed, before)
