"""Generates questions on variables: integers are set and added to each other; the question is for one value.

Source: Amos et al. 2026, Thinking States, arXiv 2602.08332, on state tracking; the paper does not give the number of
variables or their range. Values are taken modulo `modulus`, which the text of a question does not mention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.core.values import flag, require_one_of, whole_number
from cacheprobe.tasks.base import Example, Question
from cacheprobe.tasks.drawing import FILLERS, CountedTask, Writer, filler, pick
from cacheprobe.tasks.words import vocabulary_of

SAYS = ("value", "assignment")


def variables_question(
    initial: Sequence[int],
    events: Sequence[tuple[str, str]],
    asked: str,
    modulus: int,
    says: str = "value",
    question_first: bool = False,
    fillers: Sequence[str] = (),
) -> Question:
    """Returns the Question for the value of variable `asked`, after `events` changed the variables a, b, ...

    initial: the values of a, b, ... before the events.
    events: (changed, added) variables, as in a = a + b; values are modulo `modulus`.  says, question_first: as in
    `Variables`.  fillers: the words after each event, with a leading space. States are the values of all variables.
    """
    values = dict(zip(ascii_lowercase, initial, strict=False))
    question = f"What is {asked}?"
    writer = Writer(f"{question} " if question_first else "")
    writer.mark(", ".join(f"{name} = {value}" for name, value in values.items()))
    states = [" ".join(map(str, values.values()))]
    thoughts = list(states)
    for event, padding in zip(events, fillers or [""] * len(events), strict=True):
        name, added = event
        writer.say(". ")
        writer.mark(f"{name} = {name} + {added}")
        writer.say(padding)
        values[name] = (values[name] + values[added]) % modulus
        states.append(" ".join(map(str, values.values())))
        thoughts.append(f"{values[name]}" if says == "value" else f"{name} = {values[name]}")
    writer.say(". A:" if question_first else f". {question} A:")
    return writer.question(f" {values[asked]}", [f" {value}" for value in range(modulus)], events, states, thoughts)


@register("tasks", "variables")
@dataclass(frozen=True)
class Variables(CountedTask):
    """Generates questions on `variables` random integers a, b, ... that `updates` additions (a = a + b) change.

    Every update has two different variables. All values are modulo `modulus`. Every answer is equally likely,
    because an update is invertible.
    says: the thought after an update: the new "value" ("7"), or the whole "assignment" ("a = 7").
    question_first: True puts the question before the story, False after it.
    jitter: largest number of filler words after each update, drawn at random, so that updates end anywhere in a chunk.
    """

    updates: int = 4
    variables: int = 3
    modulus: int = 10
    says: str = "value"
    question_first: bool = False
    jitter: int = 0

    counted: ClassVar[str] = "updates"

    def __post_init__(self) -> None:
        whole_number("updates", self.updates, at_least=1)
        whole_number("variables", self.variables, at_least=2)
        whole_number("modulus", self.modulus, at_least=2)
        whole_number("jitter", self.jitter, at_least=0)
        require_one_of("says", self.says, SAYS)
        flag("question_first", self.question_first)
        if self.variables > len(ascii_lowercase):
            raise ValueError(f"variables={self.variables} is more than there are letters; give {len(ascii_lowercase)}")

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess among the possible answers: 1 / `modulus`."""
        return 1 / self.modulus

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of the texts about variables, for
        `word_tokenizer`."""
        names, numbers = ascii_lowercase[: self.variables], map(str, range(self.modulus))
        return vocabulary_of(["What is? A: =, +.", *names, *numbers, *(FILLERS if self.jitter else ())])

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`: values, updates and the variable to ask for are random."""
        rng = Random(f"variables/{seed}/{index}")
        names = ascii_lowercase[: self.variables]
        initial = [int(rng.random() * self.modulus) for _ in names]
        asked = pick(rng, names)
        events = []
        for _ in range(self.updates):
            name = pick(rng, names)
            events.append((name, pick(rng, names.replace(name, ""))))
        padding = Random(f"variables/{seed}/{index}/filler")
        fillers = [filler(padding, int(padding.random() * (self.jitter + 1))) for _ in events]
        return Example(
            variables_question(initial, events, asked, self.modulus, self.says, self.question_first, fillers)
        )
