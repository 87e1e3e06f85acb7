"""What every task offers: examples by (seed, index), a number of operations, and all the words it can say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from random import Random
from typing import ClassVar

from cacheprobe.tasks.base import Example


class Task(ABC):
    """Questions of one kind. A task is a frozen dataclass of its settings."""

    answers_are_even: ClassVar[bool] = True
    """Whether all answers are equally likely, so that no constant answer does better than chance."""

    @property
    @abstractmethod
    def num_operations(self) -> int:
        """How many operations each question has."""

    @abstractmethod
    def with_operations(self, count: int) -> Task:
        """The same task with questions of `count` operations."""

    @property
    def answers_balanced_over(self) -> int:
        """Each run of so many examples, from the first, holds each answer equally often; 1: nothing is arranged."""
        return 1

    @property
    @abstractmethod
    def chance(self) -> float:
        """The accuracy of a guess among the answers, each as likely."""

    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """All words of questions, answers, states and thoughts of this task with any number of operations, sorted."""

    @abstractmethod
    def example(self, index: int, seed: int = 0) -> Example:
        """Example `index` of the set that `seed` names; it depends on nothing else."""

    def examples(self, n: int, seed: int = 0) -> list[Example]:
        """`n` independent examples. Example i depends on (seed, i) alone: a larger n continues a smaller one."""
        check_count("n", n, at_least=1)
        check_count("seed", seed)
        return [self.example(index, seed) for index in range(n)]


def mixed(task: Task, operations: Iterable[int] = range(1, 11), *, n: int, seed: int = 0) -> list[Example]:
    """`n` examples of a task, each with a number of operations drawn uniformly from `operations`.

    Example i is that of `task.with_operations(k).examples(n, seed)`, for its k; it depends on (seed, i) alone.
    Examples whose answers are balanced against each other have the same k, so every k is balanced by itself.
    """
    check_count("n", n, at_least=1)
    check_count("seed", seed)
    tasks = [task.with_operations(count) for count in operations]
    if not tasks:
        raise ValueError("operations is empty; give the numbers of operations to draw from, such as range(1, 11)")
    run = task.answers_balanced_over
    examples: list[Example] = []
    for first in range(0, n, run):
        chosen = tasks[int(Random(f"mixed/{seed}/{first // run}").random() * len(tasks))]
        examples += [chosen.example(index, seed) for index in range(first, min(first + run, n))]
    return examples


def balanced_side(key: str, index: int) -> int:
    """0 or 1 for an example: of examples 0 and 1, 2 and 3, ... one of each, in random order."""
    return (Random(f"{key}/pair/{index // 2}").random() < 0.5) ^ (index % 2)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {choices}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_probability(name: str, value: float | int) -> None:
    if not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} is no probability; give a number from 0 to 1")


def check_count(name: str, value: int, at_least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or (at_least is not None and value < at_least):
        bound = "" if at_least is None else f", {at_least} or more"
        raise ValueError(f"{name}={value!r} must be a whole number{bound}")
