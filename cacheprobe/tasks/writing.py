"""Builds task texts: records which characters set a state, draws at random, and lists filler words and names."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from cacheprobe.tasks.base import Event, Question

NAMES = tuple(
    """
    Adam Alan Alice Amy Andrew Anna Anthony Arthur Barbara Ben Beth Bob Brian Carl Carol Charles Chris Claire
    Daniel David Diana Donald Dorothy Edward Ellen Emily Emma Eric Eva Frank Fred George Grace Hannah Harry
    Helen Henry Ian Jack Jacob James Jane Jason Jennifer Jessica John Joseph Julia Karen Kate Kevin Laura Lisa
    Louis Lucy Maria Mark Martha Martin Mary Matthew Michael Nancy Nicole Oliver Oscar Paul Peter Philip
    Rachel Ralph Rebecca Robert Roger Rose Ruth Sam Sarah Scott Simon Sophie Stephen Steven Susan Thomas Tim
    Victor Victoria Walter William
    """.split()
)
HELD_OUT_NAMES = NAMES[3::4]
"""Every fourth name. LoRA trainings do not use these names, so that a test has names that no adapter was trained on."""
TRAIN_NAMES = tuple(name for name in NAMES if name not in HELD_OUT_NAMES)


def check_names(names: Sequence[str], needed: int, why: str, remedy: str, what: str = "names") -> None:
    """Checks names. Raises: ValueError for one string in place of a sequence, for fewer than `needed` names, a repeated
    name, or a name that is not words with single spaces between them.

    why, remedy: first and last part of the error message about too few names.  what: the plural noun in the messages.
    """
    if isinstance(names, str):
        raise ValueError(f"{what}={names!r} is one string; give a sequence of {what}")
    for name in names:
        if not isinstance(name, str) or not name or name != " ".join(name.split()):
            raise ValueError(f"{what} holds {name!r}; give words, with single spaces between them at most")
    if len(set(names)) < len(names):
        raise ValueError(f"{what} holds a name more than once; give each once")
    if needed > len(names):
        raise ValueError(f"{why}, got {len(names)}; {remedy}")


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

    def question(
        self,
        answer: str,
        answers: Sequence[str],
        events: Sequence[Event],
        states: Sequence[str],
        thoughts: Sequence[str] = (),
    ) -> Question:
        """Returns the Question with this text and its spans; `Question` explains the arguments."""
        spans = tuple(self.spans)
        return Question(self.text, answer, tuple(answers), tuple(events), tuple(states), spans, tuple(thoughts))


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
