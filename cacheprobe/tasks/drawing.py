"""Defines the interface of every task (`Task`): numbered examples, number of operations, words. Checks settings."""

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
    """Generates questions of one kind. A subclass should be a frozen dataclass of its settings."""

    answers_are_even: ClassVar[bool] = True
    """Whether the default settings make all answers equally likely; a constant answer is then no better than chance."""

    @property
    @abstractmethod
    def num_operations(self) -> int:
        """Number of operations in each question. In the coin tasks, each person is one operation, flip or not."""

    @abstractmethod
    def with_operations(self, count: int) -> Task:
        """Returns a copy of the task with `count` operations in each question."""

    @property
    def answers_balanced_over(self) -> int:
        """Size of the groups of consecutive examples in which every answer occurs equally often; 1 if not balanced."""
        return 1

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of a uniform guess among the possible answers, from 0 to 1."""

    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of questions, answers, states and
        thoughts. `word_tokenizer` takes the tuple."""

    @abstractmethod
    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`. The Example depends only on the task's settings and these two
        numbers."""

    def examples(self, n: int, seed: int = 0) -> list[Example]:
        """Returns a list of `n` Examples. Example i depends on the settings, `seed` and i, not on `n`."""
        check_count("n", n, at_least=1)
        check_count("seed", seed)
        return [self.example(index, seed) for index in range(n)]


@dataclass(frozen=True)
class CountedTask(Task):
    """Implements `num_operations` and `with_operations` for tasks in which one setting is the number of operations."""

    counted: ClassVar[str]
    """Name of the setting that is the number of operations, such as "people"."""

    @property
    def num_operations(self) -> int:
        """Number of operations in each question: the value of the setting named `counted`."""
        return getattr(self, self.counted)

    def with_operations(self: T, count: int) -> T:
        """Returns a copy of the task with `count` operations in each question."""
        return replace(self, **{self.counted: count})


def mixed(task: Task, operations: Iterable[int] = range(1, 11), *, n: int, seed: int = 0) -> list[Example]:
    """Returns `n` examples of a task, each with a number of operations drawn uniformly from `operations`.

    Example i equals example i of `task.with_operations(k).examples(n, seed)`, in which k is the number drawn for
    example i, and does not depend on `n`. Examples of a group with balanced answers have the same k, so every k is
    balanced.
    """
    check_count("n", n, at_least=1)
    check_count("seed", seed)
    tasks = [task.with_operations(count) for count in operations]
    if not tasks:
        raise ValueError("operations is empty; give the numbers of operations to draw from, such as range(1, 11)")
    group_size = task.answers_balanced_over
    examples: list[Example] = []
    for first in range(0, n, group_size):
        chosen = tasks[int(Random(f"mixed/{seed}/{first // group_size}").random() * len(tasks))]
        examples += [chosen.example(index, seed) for index in range(first, min(first + group_size, n))]
    return examples


def balanced_side(key: str, index: int) -> int:
    """Returns 0 or 1 for example number `index`. Of each pair of examples (0 and 1, 2 and 3, ...), one gets 0 and the
    other 1, in random order."""
    return (Random(f"{key}/pair/{index // 2}").random() < 0.5) ^ (index % 2)


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Checks the setting `name`. Raises: ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {choices}")


def check_flag(name: str, value: object) -> None:
    """Checks the setting `name`. Raises: ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_probability(name: str, value: float | int) -> None:
    """Checks the setting `name`. Raises: ValueError unless `value` is a number from 0 to 1."""
    if not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} is no probability; give a number from 0 to 1")


def check_count(name: str, value: int, at_least: int | None = None) -> None:
    """Checks the setting `name`. Raises: ValueError unless `value` is a whole number and, if given, >= `at_least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (at_least is not None and value < at_least):
        bound = "" if at_least is None else f", {at_least} or more"
        raise ValueError(f"{name}={value!r} must be a whole number{bound}")
