"""Generates questions on boxes: objects are put in, moved and removed, and the question is what one box contains.

Source: the task is that of Kim and Schuster 2023, arXiv 2305.02363; names, sizes and random draws are our own, and each
operation takes one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import comb
from random import Random
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.core.values import whole_number
from cacheprobe.tasks.base import Example, Question
from cacheprobe.tasks.drawing import CountedTask, Writer, pick, require_names
from cacheprobe.tasks.words import vocabulary_of

OBJECTS = ("apple", "bell", "book", "coin", "key", "lamp", "map", "pen")
NOTHING = "nothing"
MOST_ANSWERS = 10_000

BoxEvent = tuple[str, str, int | None, int | None]
"""(action, object, number of the source box, number of the target box), from 1; None means outside of the boxes."""


def boxes_question(
    initial: Sequence[Iterable[str]], events: Sequence[BoxEvent], asked: int, objects: Sequence[str], at_most: int
) -> Question:
    """Returns the Question for the content of box number `asked`, after `events` on boxes with `initial` contents.

    The possible answers are all contents of up to `at_most` of `objects`. States are the contents of all boxes in
    order. The thought after an operation is the new content of each box that the operation changed.
    """
    boxes = {number: set(content) for number, content in enumerate(initial, 1)}
    writer = Writer()
    writer.mark(", ".join(f"Box {number} contains {_listed(content)}" for number, content in boxes.items()))
    states, thoughts = [_state(boxes)], [_state(boxes)]
    for action, thing, source, target in events:
        writer.say(". ")
        writer.mark(_clause(action, thing, source, target))
        changed = [number for number in (source, target) if number is not None]
        if source is not None:
            boxes[source].remove(thing)
        if target is not None:
            boxes[target].add(thing)
        states.append(_state(boxes))
        thoughts.append(", ".join(f"Box {number} {_named(boxes[number])}" for number in changed))
    writer.say(f". What does Box {asked} contain? A:")
    answers = _contents(tuple(sorted(objects)), at_most)
    return writer.question(f" {_listed(boxes[asked])}", answers, events, states, thoughts)


@register("tasks", "boxes")
@dataclass(frozen=True)
class Boxes(CountedTask):
    """Generates questions on `boxes` boxes that contain up to `at_most` objects each, after `steps` operations.

    At first, each object is in a random box with room, or with probability 1/3 in none. Each operation is put, remove
    or move, chosen uniformly among the possible ones, then with a random possible object and boxes. Contents are named
    in alphabetical order. The question is about a random box. Answers are not equally likely: with the default
    settings, "nothing" is the most frequent.
    `accuracy_by(examples, texts, affecting)` groups the score by the number of operations on the question's box.
    """

    steps: int = 4
    boxes: int = 4
    at_most: int = 3
    objects: Sequence[str] = OBJECTS

    counted: ClassVar[str] = "steps"
    answers_are_even: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, at_least=1)
        whole_number("boxes", self.boxes, at_least=2)
        whole_number("at_most", self.at_most, at_least=1)
        require_names(self.objects, 2, "objects must be two at least", "give more", what="objects")
        if any(" " in thing for thing in self.objects):
            raise ValueError(f"objects must be single words, got {tuple(self.objects)}")
        if self._num_answers > MOST_ANSWERS:
            raise ValueError(
                f"{len(self.objects)} objects, at_most={self.at_most} of them in a box, make {self._num_answers:,} "
                f"answers, and every question lists them; give fewer, for up to {MOST_ANSWERS:,}"
            )

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess among all possible contents of a box."""
        return 1 / self._num_answers

    @property
    def _num_answers(self) -> int:
        """Number of possible contents of a box."""
        return sum(comb(len(self.objects), size) for size in range(min(self.at_most, len(self.objects)) + 1))

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of the texts about boxes, for
        `word_tokenizer`."""
        numbers = map(str, range(1, self.boxes + 1))
        words = "Box contains nothing, the. Put into. Remove from. Move to. What does contain? A:"
        return vocabulary_of([words, "and" * (self.at_most > 1), *numbers, *self.objects])

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`: contents, operations and the box to ask for are random."""
        rng = Random(f"boxes/{seed}/{index}")
        places: dict[str, int | None] = {}
        for thing in self.objects:
            into = pick(rng, self._with_room(places)) if self._with_room(places) else None
            places[thing] = into if rng.random() < 2 / 3 else None
        boxes = range(1, self.boxes + 1)
        initial = [[thing for thing in self.objects if places[thing] == number] for number in boxes]
        asked = pick(rng, boxes)
        events = []
        for _ in range(self.steps):
            events.append(self._event(rng, places))
            places[events[-1][1]] = events[-1][3]
        return Example(boxes_question(initial, events, asked, self.objects, self.at_most))

    def _with_room(self, places: Mapping[str, int | None]) -> list[int]:
        """Returns the numbers of the boxes with fewer than `at_most` objects. places: box of each object, or None."""
        occupied = list(places.values())
        return [number for number in range(1, self.boxes + 1) if occupied.count(number) < self.at_most]

    def _event(self, rng: Random, places: Mapping[str, int | None]) -> BoxEvent:
        """Returns a random possible operation as a BoxEvent. places: number of the box of each object, or None."""
        room = self._with_room(places)
        outside = [thing for thing, place in places.items() if place is None]
        inside = [thing for thing, place in places.items() if place is not None]
        # an object can move if a box other than its own has room
        movable = [thing for thing in inside if room not in ([], [places[thing]])]
        possible = {"put": outside if room else [], "remove": inside, "move": movable}
        action = pick(rng, [action for action, things in possible.items() if things])
        thing = pick(rng, possible[action])
        source = places[thing]
        target = None if action == "remove" else pick(rng, [number for number in room if number != source])
        return action, thing, source, target


def _clause(action: str, thing: str, source: int | None, target: int | None) -> str:
    """Returns an operation in words, such as "Put the key into Box 2"."""
    if action == "put":
        return f"Put the {thing} into Box {target}"
    if action == "remove":
        return f"Remove the {thing} from Box {source}"
    return f"Move the {thing} from Box {source} to Box {target}"


def _listed(content: Iterable[str]) -> str:
    """Returns a box's content as an answer: "the bell and the key", or "nothing"."""
    return " and ".join(f"the {thing}" for thing in sorted(content)) or NOTHING


def _named(content: Iterable[str]) -> str:
    """Returns a box's content as part of a state: "bell key", or "nothing"."""
    return " ".join(sorted(content)) or NOTHING


def _state(boxes: Mapping[int, Iterable[str]]) -> str:
    """Returns the contents of all boxes as one text: "bell key, nothing, pen"."""
    return ", ".join(map(_named, boxes.values()))


@lru_cache
def _contents(objects: tuple[str, ...], at_most: int) -> tuple[str, ...]:
    """Returns a tuple of all possible answers: contents of up to `at_most` objects as text, those with most objects
    first."""
    sizes = range(min(at_most, len(objects)), -1, -1)
    return tuple(f" {_listed(content)}" for size in sizes for content in combinations(objects, size))
