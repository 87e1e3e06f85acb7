"""A coin flip among filler words, in which a chosen share of the chunks contains an operation."""

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
    """Coin-flip questions for chunks of `chunk` tokens of the word tokenizer, most of which may contain only filler
    words.

    The prompt is whole chunks: those of the opening statement, then round(people / density) chunks of which `people`,
    drawn at random, begin with an operation, then those of the question. All other tokens are filler words and full
    stops. Of the chunks between statement and question, the share `density` therefore has a thought (form "state"),
    rounded to a whole number of chunks; at density=1, all do.
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
        """Returns all words of this task's texts, sorted."""
        words = f"A coin's state is {' '.join(STATES)}. flips does not flip. {CLOSING}"
        return vocabulary_of([words, *self.names, *FILLERS])

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns example `index` of the set `seed`."""
        plain = self._coin().example(index, seed).question
        rng = Random(f"coin_flip_sparse/{seed}/{index}")
        count = max(round(self.people / self.density), self.people)
        holding = set(draw(rng, range(count), self.people))
        clauses = [plain.text[start:end] for start, end in plain.spans]
        writer = Writer()
        for place in range(-1, count):
            words = clauses.pop(0) if place < 0 or place in holding else ""
            sentence = filler(rng, -(len(split_words(words)) + 1) % self.chunk) + ". "
            if words:
                writer.mark(words)
            writer.say(sentence if words else sentence.lstrip(" "))
        room = -len(split_words(CLOSING)) % self.chunk
        if room:
            words = room - 1 or self.chunk
            writer.say(filler(rng, words).lstrip(" ") + ". ")
        writer.say(CLOSING)
        return Example(replace(plain, text=writer.text, spans=tuple(writer.spans)))
