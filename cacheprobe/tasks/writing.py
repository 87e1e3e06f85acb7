"""What tasks are put together from: draws, marked words, and words that mean nothing to the question."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")

FILLERS = tuple("birds calmly clouds drift falls meanwhile nearby outside quietly rain sing softly".split())
"""Words that change no state."""


class Writer:
    """A text that grows, and the characters (start, end) of the pieces in it that set a state."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.spans: list[tuple[int, int]] = []

    def say(self, words: str) -> None:
        self.text += words

    def mark(self, words: str) -> None:
        """Say words that state the initial state or an operation."""
        self.spans.append((len(self.text), len(self.text) + len(words)))
        self.text += words


def filler(rng: Random, count: int) -> str:
    """`count` meaningless words, each with a space in front."""
    return "".join(" " + FILLERS[int(rng.random() * len(FILLERS))] for _ in range(count))


def draw(rng: Random, things: Sequence[T], count: int, distinct: bool = True) -> list[T]:
    """`count` things: different ones in random order (the start of a Fisher-Yates shuffle), or each any of all."""
    if not distinct:
        return [things[int(rng.random() * len(things))] for _ in range(count)]
    pool = list(things)
    for index in range(count):
        other = index + int(rng.random() * (len(pool) - index))
        pool[index], pool[other] = pool[other], pool[index]
    return pool[:count]


def pick(rng: Random, choices: Sequence[T]) -> T:
    """One of `choices`, each as likely; by rng.random() alone, so that every Python picks the same."""
    return choices[int(rng.random() * len(choices))]
