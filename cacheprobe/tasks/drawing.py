"""The interface of every task: examples by (seed, index), a number of operations, and all words of its texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from random import Random
from typing import ClassVar, TypeVar

from cacheprobe.tasks.base import Example

T = TypeVar("T", bound="CountedTask")


class Task(ABC):
    """Questions of one kind. A task is a frozen dataclass of its settings."""

    answers_are_even: ClassVar[bool] = True
    """Whether all answers are equally likely, so that no constant answer is better than chance."""

    @property
    @abstractmethod
    def num_operations(self) -> int:
        """Number of operations in a question."""

    @abstractmethod
    def with_operations(self, count: int) -> Task:
        """Returns the same task with `count` operations in a question."""

    @property
    def answers_balanced_over(self) -> int:
        """Number of consecutive examples, counted from the first, in which each answer occurs equally often; 1 if not
        balanced."""
        return 1

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of a uniform guess among the answers."""

    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """Returns all words of this task's questions, answers, states and thoughts, for any number of operations,
        sorted."""

    @abstractmethod
    def example(self, index: int, seed: int = 0) -> Example:
        """Returns example `index` of the set `seed`; the example depends on no other value."""

    def examples(self, n: int, seed: int = 0) -> list[Example]:
        """Returns `n` independent examples. Example i depends on (seed, i) only: a larger n extends a smaller one."""
        check_count("n", n, at_least=1)
        check_count("seed", seed)
        return [self.example(index, seed) for index in range(n)]


@dataclass(frozen=True)
class CountedTask(Task):
    """A task in which the number of operations is one of the settings."""

    counted: ClassVar[str]
    """Name of that setting."""

    @property
    def num_operations(self) -> int:
        """Number of operations in a question."""
        return getattr(self, self.counted)

    def with_operations(self: T, count: int) -> T:
        """Returns the same task with `count` operations in a question."""
        return replace(self, **{self.counted: count})


def mixed(task: Task, operations: Iterable[int] = range(1, 11), *, n: int, seed: int = 0) -> list[Example]:
    """Returns `n` examples of a task, each with a number of operations drawn uniformly from `operations`.

    Example i is that of `task.with_operations(k).examples(n, seed)`, for its k; it depends on (seed, i) only. Examples
    whose answers are balanced against each other have the same k, so every k is balanced separately.
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
    """Returns 0 or 1 for an example: of examples 0 and 1, 2 and 3, ... one of each, in random order."""
    return (Random(f"{key}/pair/{index // 2}").random() < 0.5) ^ (index % 2)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises: ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {choices}")


def check_flag(name: str, value: object) -> None:
    """Raises: ValueError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_probability(name: str, value: float | int) -> None:
    """Raises: ValueError unless the value is a number from 0 to 1."""
    if not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} is no probability; give a number from 0 to 1")


def check_count(name: str, value: int, at_least: int | None = None) -> None:
    """Raises: ValueError unless the value is a whole number, not below `at_least` if given."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (at_least is not None and value < at_least):
        bound = "" if at_least is None else f", {at_least} or more"
        raise ValueError(f"{name}={value!r} must be a whole number{bound}")
