"""Builds task texts: records which characters set a state, draws at random, and makes filler words."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")

FILLERS = tuple("birds calmly clouds drift falls meanwhile nearby outside quietly rain sing softly".split())
"""Words that fill a text and change no state."""


class Writer:
    """Builds a text part by part, and records the characters (start, end) of the parts that set a state."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.spans: list[tuple[int, int]] = []

    def say(self, words: str) -> None:
        """Appends words to the text, without recording their characters."""
        self.text += words

    def mark(self, words: str) -> None:
        """Appends words that state the initial state or an operation, and records their (start, end) in `spans`."""
        self.spans.append((len(self.text), len(self.text) + len(words)))
        self.text += words


def filler(rng: Random, count: int) -> str:
    """Returns a text of `count` random filler words, each with a leading space."""
    return "".join(" " + FILLERS[int(rng.random() * len(FILLERS))] for _ in range(count))


def draw(rng: Random, things: Sequence[T], count: int, distinct: bool = True) -> list[T]:
    """Returns a list of `count` of the `things`, drawn at random. If `distinct`, no thing is drawn twice; otherwise
    draws are independent."""
    if not distinct:
        return [things[int(rng.random() * len(things))] for _ in range(count)]
    pool = list(things)
    for index in range(count):  # the first `count` swaps of a Fisher-Yates shuffle
        other = index + int(rng.random() * (len(pool) - index))
        pool[index], pool[other] = pool[other], pool[index]
    return pool[:count]


def pick(rng: Random, choices: Sequence[T]) -> T:
    """Returns one of `choices`, drawn uniformly. Calls only rng.random(), so every Python version draws the same."""
    return choices[int(rng.random() * len(choices))]
