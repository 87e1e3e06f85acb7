"""Readers of task texts: they find the clauses and work out the states from the words alone, sharing no code."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Read:
    """states: after 0, 1, ... operations.  clauses: the words of the initial statement and of each operation."""

    states: tuple[str, ...]
    clauses: list[str]
    answer: str


@dataclass(frozen=True)
class Simulator:
    """read: the text of a question -> what it says.  variants: settings of the task to test, beside the default."""

    read: Callable[[str], Read]
    variants: tuple[dict, ...]


def read_coin(text: str) -> Read:
    statement, story, _ = text.split(". ")
    state = statement.split()[-1]
    states, clauses = [state], [statement]
    for clause in story.split(", then "):
        if clause.endswith(" flips"):
            state = {"heads": "tails", "tails": "heads"}[state]
        elif not clause.endswith(" does not flip"):
            raise ValueError(f"who does what? {clause!r}")
        states.append(state)
        clauses.append(clause)
    return Read(tuple(states), clauses, state)


SIMULATORS = {
    "coin_flip": Simulator(
        read_coin, ({}, {"initial": "tails"}, {"distinct": False, "balanced": False}, {"flip_probability": 0.1})
    ),
}
