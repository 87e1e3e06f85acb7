"""Generates coin-flip questions with filler words, in which a chosen share of the text's chunks has an operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from cacheprobe.core.registry import register
from cacheprobe.tasks.base import Example
from cacheprobe.tasks.coin_flip import STATES, CoinFlip, CoinTask
from cacheprobe.tasks.drawing import check_count, check_probability
from cacheprobe.tasks.people import NAMES
from cacheprobe.tasks.words import split_words, vocabulary_of
from cacheprobe.tasks.writing import FILLERS, Writer, draw, filler

CLOSING = "What's the state? A:"


@register("tasks", "coin_flip_sparse")
@dataclass(frozen=True)
class CoinFlipSparse(CoinTask):
    """Generates coin-flip questions among filler words; about the share `density` of the chunks has an operation.

    chunk: number of tokens of the word tokenizer that a Thinking States model reads at a time.
    The prompt is whole chunks: first those of the opening statement, then round(people / density) chunks, then those of
    the question. Of the middle chunks, `people`, drawn at random, begin with an operation, and so have a thought (form
    "state"). All other tokens are filler words and full stops. At density=1, every middle chunk has an operation.
    Coins, people and flips are those of `CoinFlip(distinct=False)` with the same seed and settings.
    """

    people: int = 4
    density: float | int = 0.25
    chunk: int = 8
    flip_probability: float | int = 0.5
    names: Sequence[str] = NAMES

    def __post_init__(self) -> None:
        self._coin()
        check_probability("density", self.density)
        if not self.density > 0:
            raise ValueError("density=0 would leave no room for an operation; give a share above 0, such as 0.05")
        longest = max((len(split_words(f"{name} does not flip.")) for name in self.names), default=0)
        check_count("chunk", self.chunk, at_least=longest)

    def _coin(self) -> CoinFlip:
        return CoinFlip(self.people, flip_probability=self.flip_probability, names=self.names, distinct=False)

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of these coin-flip texts, fillers included, for
        `word_tokenizer`."""
        words = f"A coin's state is {' '.join(STATES)}. flips does not flip. {CLOSING}"
        return vocabulary_of([words, *self.names, *FILLERS])

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`: a question of `CoinFlip`, with filler words put in."""
        question = self._coin().example(index, seed).question
        rng = Random(f"coin_flip_sparse/{seed}/{index}")
        num_chunks = max(round(self.people / self.density), self.people)
        with_operation = set(draw(rng, range(num_chunks), self.people))
        clauses = [question.text[start:end] for start, end in question.spans]
        writer = Writer()
        for chunk in range(-1, num_chunks):  # -1: the opening statement, which may take several chunks
            words = clauses.pop(0) if chunk < 0 or chunk in with_operation else ""
            # words, filler words and the full stop fill whole chunks
            sentence = filler(rng, -(len(split_words(words)) + 1) % self.chunk) + ". "
            if words:
                writer.mark(words)
            writer.say(sentence if words else sentence.lstrip(" "))
        num_missing = -len(split_words(CLOSING)) % self.chunk
        if num_missing:
            count = num_missing - 1 or self.chunk  # no full stop without a word: if one token is missing, add a chunk
            writer.say(filler(rng, count).lstrip(" ") + ". ")
        writer.say(CLOSING)
        return Example(replace(question, text=writer.text, spans=tuple(writer.spans)))
