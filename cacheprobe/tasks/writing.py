"""Helpers that build task texts: random draws, marked words, and filler words."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")

FILLERS = tuple("birds calmly clouds drift falls meanwhile nearby outside quietly rain sing softly".split())
"""Words that change no state."""


class Writer:
    """A growing text, and the characters (start, end) of its parts that set a state."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.spans: list[tuple[int, int]] = []

    def say(self, words: str) -> None:
        """Appends words."""
        self.text += words

    def mark(self, words: str) -> None:
        """Appends words that state the initial state or an operation, and records their characters."""
        self.spans.append((len(self.text), len(self.text) + len(words)))
        self.text += words


def filler(rng: Random, count: int) -> str:
    """Returns `count` filler words, each with a leading space."""
    return "".join(" " + FILLERS[int(rng.random() * len(FILLERS))] for _ in range(count))


def draw(rng: Random, things: Sequence[T], count: int, distinct: bool = True) -> list[T]:
    """Returns `count` things: different ones in random order (the start of a Fisher-Yates shuffle), or independent
    draws."""
    if not distinct:
        return [things[int(rng.random() * len(things))] for _ in range(count)]
    pool = list(things)
    for index in range(count):
        other = index + int(rng.random() * (len(pool) - index))
        pool[index], pool[other] = pool[other], pool[index]
    return pool[:count]


def pick(rng: Random, choices: Sequence[T]) -> T:
    """Returns one of `choices`, uniformly; uses rng.random() only, so that every Python version picks the same."""
    return choices[int(rng.random() * len(choices))]
