"""Generates questions on permutations: the contents of cups are swapped, or elements of a symmetric group multiplied.

Source: Li, Guo and Andreas 2025, arXiv 2503.02854: the word problem on the symmetric groups S3 and S5; the state is the
running product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, permutations
from random import Random
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.core.values import require_one_of, whole_number
from cacheprobe.tasks.base import Example, Question
from cacheprobe.tasks.drawing import FILLERS, CountedTask, Writer, filler, pick
from cacheprobe.tasks.words import vocabulary_of

COLOURS = ("red", "green", "blue", "white", "black")
WORDINGS = ("cups", "group")
ASKED = ("cup", "all")


def cups_question(
    initial: Sequence[str], events: Sequence[tuple[int, int]], cup: int | None, fillers: Sequence[str] = ()
) -> Question:
    """Returns the Question for cups with the colours `initial`, after `events`: (number, number) of two swapped cups.

    cup: number of the cup in the question, from 1; None asks for the contents of all cups. States are all contents in
    order.  fillers: the words after each event, with a leading space.
    """
    order = list(initial)
    colours = COLOURS[: len(order)]
    writer, states = Writer(), [" ".join(order)]
    writer.mark(f"The cups hold {states[0]}")
    for (first, second), padding in zip(events, fillers or [""] * len(events), strict=True):
        writer.say(". ")
        writer.mark(f"Swap {first} and {second}")
        writer.say(padding)
        order[first - 1], order[second - 1] = order[second - 1], order[first - 1]
        states.append(" ".join(order))
    writer.say(". What do the cups hold? A:" if cup is None else f". What is in cup {cup}? A:")
    answers = [f" {one}" for one in (_permutations(colours, " ") if cup is None else colours)]
    answer = f" {states[-1] if cup is None else order[cup - 1]}"
    return writer.question(answer, answers, events, states)


def group_question(actions: Sequence[str], fillers: Sequence[str] = ()) -> Question:
    """Returns the Question for the product of `actions`: permutations as digits; "312" takes 1 to 3, 2 to 1, 3 to 2.

    The first action is the initial state. Each later action is applied to the state before: state(i) becomes
    action(state(i)).  fillers: the words after each later action, with a leading space.
    """
    writer, states = Writer(), [actions[0]]
    writer.mark(actions[0])
    for action, padding in zip(actions[1:], fillers or [""] * (len(actions) - 1), strict=True):
        writer.say(" ")
        writer.mark(action)
        writer.say(padding)
        states.append("".join(action[int(element) - 1] for element in states[-1]))
    writer.say(" A:")
    answers = [f" {order}" for order in _permutations("".join(sorted(actions[0])))]
    return writer.question(f" {states[-1]}", answers, actions[1:], states)


def parity(order: Sequence) -> int:
    """Returns the parity of the permutation `order`: 0 if an even number of swaps sorts it, 1 if an odd number does.

    Source: Li, Guo and Andreas 2025, the parity of a state.  Twin: numpy's determinant, ==.
    """
    return sum(first > second for first, second in combinations(order, 2)) % 2


@register("tasks", "permutations")
@dataclass(frozen=True)
class Permutations(CountedTask):
    """Generates questions on permutations of `elements` objects, after `steps` operations.

    All orders are equally likely at the start, and therefore at every step.
    wording "cups": each operation swaps the contents of two cups; the state is the contents of all cups. A swap is odd,
    so the number of swaps determines the parity of the change.
    wording "group": each operation is any of the n! permutations; the state is the product so far, from the first on.
    asked: for "cups", "cup" asks what one cup holds, "all" what all cups hold; "group" always asks for the product.
    jitter: largest number of filler words after each operation, drawn at random, so that operations end anywhere in a
    chunk.
    """

    steps: int = 4
    elements: int = 3
    wording: str = "cups"
    asked: str = "cup"
    jitter: int = 0

    counted: ClassVar[str] = "steps"

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, at_least=1)
        whole_number("elements", self.elements, at_least=2)
        whole_number("jitter", self.jitter, at_least=0)
        require_one_of("wording", self.wording, WORDINGS)
        require_one_of("asked", self.asked, ASKED)
        if self.elements > len(COLOURS):
            raise ValueError(f"elements={self.elements} is too many; give 2 to {len(COLOURS)}")

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess: 1 / n if one of n cups is asked for; otherwise 1 / n!, for n `elements`."""
        if self.wording == "cups" and self.asked == "cup":
            return 1 / self.elements
        return 1 / len(list(permutations(range(self.elements))))

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of the texts about permutations, for
        `word_tokenizer`."""
        digits = "12345"[: self.elements]
        fillers = FILLERS if self.jitter else ()
        if self.wording == "group":
            return vocabulary_of(["A:", *map("".join, permutations(digits)), *fillers])
        question = "What is in cup?" if self.asked == "cup" else "What do the cups hold?"
        return vocabulary_of(["The cups hold. Swap and. A:", question, *COLOURS[: self.elements], *digits, *fillers])

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`: initial order and operations are random."""
        rng = Random(f"permutations/{seed}/{index}")
        padding = Random(f"permutations/{seed}/{index}/filler")
        fillers = [filler(padding, int(padding.random() * (self.jitter + 1))) for _ in range(self.steps)]
        if self.wording == "group":
            actions = _permutations("12345"[: self.elements])
            return Example(group_question([pick(rng, actions) for _ in range(self.steps + 1)], fillers))
        initial = pick(rng, _permutations(COLOURS[: self.elements], " ")).split()
        cup = 1 + int(rng.random() * self.elements)
        pairs = list(combinations(range(1, self.elements + 1), 2))
        events = [pick(rng, pairs) for _ in range(self.steps)]
        return Example(cups_question(initial, events, cup if self.asked == "cup" else None, fillers))


@lru_cache
def _permutations(things: Sequence[str], between: str = "") -> tuple[str, ...]:
    """Returns a tuple of all orders of `things`, each as one text with `between` between the things."""
    return tuple(between.join(order) for order in permutations(things))
