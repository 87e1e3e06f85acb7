"""Defines the interface of every task (`Task`): numbered examples, number of operations, words. Checks settings. Builds
texts: records which characters set a state, draws at random, and lists filler words and names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, TypeVar

from cacheprobe.core.values import number, whole_number
from cacheprobe.tasks.base import Event, Example, Question
from cacheprobe.tasks.words import MARKS, vocabulary_of

T = TypeVar("T", bound="CountedTask")
Thing = TypeVar("Thing")


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
        whole_number("n", n, at_least=1)
        whole_number("seed", seed)
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


class ListedTask(Task):
    """Asks questions that a subclass lists: `prompts`, `answers`, and optionally `states`."""

    prompts: ClassVar[Sequence[str]]
    """What the model reads, up to the answer."""
    answers: ClassVar[Sequence[str]]
    """The right continuation of each prompt, with its leading space."""
    states: ClassVar[Sequence[Sequence[str | None]]] = ()
    """For each prompt, the true state after each of its words (split at white space), None before there is one; () if
    no state is known. A word that sets another state is an operation."""

    @property
    def num_operations(self) -> int:
        """Number of operations in each question. Raises: ValueError if the questions differ in it."""
        counts = {len(self.example(index).events) for index in range(len(self.prompts))}
        if not counts:
            raise ValueError(f"{type(self).__name__} lists no question; give prompts and answers")
        if len(counts) != 1:
            raise ValueError(f"questions of {type(self).__name__} have {min(counts)} to {max(counts)} operations")
        return counts.pop()

    def with_operations(self, count: int) -> ListedTask:
        """Raises: ValueError, because the questions are given."""
        raise ValueError(f"{type(self).__name__} has the questions that it lists; it makes none of {count} operations")

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess among the different answers, from 0 to 1."""
        return 1 / len(set(self.answers))

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of prompts, answers and states."""
        states = (state for listed in self.states for state in listed if state)
        return vocabulary_of((*self.prompts, *self.answers, *states))

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns question number `index` of the list, or of the list in a random order if `seed` is not 0. Raises:
        ValueError if there are fewer questions, or lists of other lengths."""
        whole_number("index", index, at_least=0)
        whole_number("seed", seed)
        name, count = type(self).__name__, len(self.prompts)
        if not len(self.answers) == count == len(self.states or self.prompts):
            lengths = f"{count} prompts, {len(self.answers)} answers and {len(self.states)} lists of states"
            raise ValueError(f"{name} has {lengths}; give one of each for each question")
        if index >= count:
            raise ValueError(f"{name} has {count} questions, 0 to {count - 1}, and no question {index}")
        order = range(count)
        if seed:
            order = sorted(order, key=lambda i: Random(f"listed/{seed}/{i}").random())
        prompt, answer = self.prompts[order[index]], self.answers[order[index]]
        answers = tuple(sorted(set(self.answers)))
        changes = _changes(prompt, self.states[order[index]]) if self.states else []
        events = tuple(prompt[start:end] for (start, end), _ in changes[1:])
        spans, states = tuple(span for span, _ in changes), tuple(state for _, state in changes)
        return Example(Question(prompt, answer, answers, events, states, spans))


def _changes(prompt: str, listed: Sequence[str | None]) -> list[tuple[tuple[int, int], str]]:
    """Returns ((start, end), state) of each word of a prompt that sets a state other than the one before. Raises:
    ValueError without one state for each word, and for None after a state."""
    words = [match.span(1) for match in re.finditer(rf"(\S+?)[{MARKS}]*(?=\s|$)", prompt)]  # without marks at the end
    if len(words) != len(listed):
        raise ValueError(f"{prompt!r} has {len(words)} words, and {len(listed)} states are listed; give one for each")
    changes: list[tuple[tuple[int, int], str]] = []
    for span, state in zip(words, listed, strict=True):
        if state is None and changes:
            raise ValueError(
                f"{prompt!r}: no state is listed after {prompt[: span[1]]!r}; a state holds until the next"
            )
        if state is not None and (not changes or changes[-1][1] != state):
            changes.append((span, state))
    return changes


def mixed(task: Task, operations: Iterable[int] = range(1, 11), *, n: int, seed: int = 0) -> list[Example]:
    """Returns `n` examples of a task, each with a number of operations drawn uniformly from `operations`.

    Example i equals example i of `task.with_operations(k).examples(n, seed)`, in which k is the number drawn for
    example i, and does not depend on `n`. Examples of a group with balanced answers have the same k, so every k is
    balanced.
    """
    whole_number("n", n, at_least=1)
    whole_number("seed", seed)
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


def require_probability(name: str, value: object) -> None:
    """Checks the setting `name`. Raises: ValueError unless `value` is a number from 0 to 1."""
    if not 0 <= number(name, value) <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value}")


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


def require_names(names: Sequence[str], needed: int, why: str, remedy: str, what: str = "names") -> None:
    """Checks names. Raises: ValueError unless they are different texts of words with single spaces between them, and
    at least `needed`.

    why, remedy: first and last part of the error message about too few names.  what: the plural noun in the messages.
    """
    if isinstance(names, str) or len(set(names)) < len(names) or any(not n or n != " ".join(n.split()) for n in names):
        raise ValueError(f"{what} must be different words, with single spaces between them, got {names!r:.80}")
    if needed > len(names):
        raise ValueError(f"{why}, got {len(names)}; {remedy}")


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


def draw(rng: Random, things: Sequence[Thing], count: int, distinct: bool = True) -> list[Thing]:
    """Returns a list of `count` of the `things`, drawn at random. If `distinct`, no thing is drawn twice; otherwise
    draws are independent."""
    if not distinct:
        return [things[int(rng.random() * len(things))] for _ in range(count)]
    pool = list(things)
    for index in range(count):  # the first `count` swaps of a Fisher-Yates shuffle
        other = index + int(rng.random() * (len(pool) - index))
        pool[index], pool[other] = pool[other], pool[index]
    return pool[:count]


def pick(rng: Random, choices: Sequence[Thing]) -> Thing:
    """Returns one of `choices`, drawn uniformly. Calls only rng.random(), so every Python version draws the same."""
    return choices[int(rng.random() * len(choices))]
