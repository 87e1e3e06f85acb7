"""Generates and parses the coin-flip questions of Wei et al.: is the coin still heads up, yes or no?

Source: Wei et al. 2022, arXiv 2201.11903, with its wording; one short sentence for each person.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from cacheprobe.core.registry import register
from cacheprobe.tasks.base import SHOT_SEPARATOR, Example, Question
from cacheprobe.tasks.coin_flip import CoinFlip, turned
from cacheprobe.tasks.drawing import Writer
from cacheprobe.tasks.words import vocabulary_of

ANSWERS = (" yes", " no")

SENTENCE = re.compile(
    r"\s*((?P<name>[^\s.]+(?:\s+[^\s.]+){0,2}?)\s+(?:(?P<flips>flips)|does\s+not\s+flip)\s+the\s+coin)\."
)  # a name has up to three words
OPENING = re.compile(r"\s*(?:Q:\s*)?(A coin is heads up)\.")
CLOSING = re.compile(r"""\s*Is the coin still heads up\?(?:\s*Note that "flip" here means "reverse"\.)?(?:\s*A:)?\s*""")


def wei_question(events: Sequence[tuple[str, bool]]) -> Question:
    """Returns the yes-or-no Question, worded as by Wei et al., for a coin that is heads up, after `events`.

    events: (name, True if the person flips the coin), one or more.
    """
    if not events:
        raise ValueError("a coin question needs at least one event, such as ('Alice', True)")
    writer = Writer("Q: ")
    writer.mark("A coin is heads up")
    for name, flipped in events:
        writer.say(". ")
        writer.mark(f"{name} flips the coin" if flipped else f"{name} does not flip the coin")
    writer.say(". Is the coin still heads up?\nA:")
    return _question(writer.text, events, writer.spans)


def parse_wei(text: str) -> Question:
    """Returns the Question that `text` asks, worded as by Wei et al.: the events are read from the sentences.

    A leading "Q:", the note that "flip" means "reverse", and a closing "A:" are optional; the returned question ends in
    "A:". Spaces and case of names stay.
    Raises: ValueError for other texts.
    """
    opening = OPENING.match(text)
    if not opening:
        raise ValueError(f"{text!r} does not begin with 'A coin is heads up.'")
    events, spans, cursor = [], [opening.span(1)], opening.end()
    while sentence := SENTENCE.match(text, cursor):
        events.append((sentence["name"], sentence["flips"] is not None))
        spans.append(sentence.span(1))
        cursor = sentence.end()
    if not events or not CLOSING.fullmatch(text, cursor):
        raise ValueError(
            f"{text!r}: after {len(events)} sentences like 'Ann flips the coin.' or 'Ann does not flip the coin.' "
            f"comes {text[cursor:].strip()!r:.60}, expected 'Is the coin still heads up?'"
        )
    whole = text.rstrip()
    return _question(whole if whole.endswith("A:") else f"{whole}\nA:", events, spans)


def _question(text: str, events: Sequence[tuple[str, bool]], spans: Sequence[tuple[int, int]]) -> Question:
    """Returns the Question with this text for a coin that is heads up, with states and answer from `events`."""
    states = ["heads"]
    for _, flipped in events:
        states.append(turned(states[-1]) if flipped else states[-1])
    answer = ANSWERS[states[-1] == "tails"]
    return Question(text, answer, ANSWERS, tuple(events), tuple(states), tuple(spans))


@register("tasks", "coin_flip_wei")
@dataclass(frozen=True)
class CoinFlipWei(CoinFlip):
    """Generates yes-or-no questions: `people` each flip a coin that is heads up, or do not. Is the coin still heads up?

    People and flips are those of `CoinFlip(initial="heads")` with the same seed. `CoinFlip` documents the settings;
    `balanced` makes half of the answers yes.
    """

    initial: str = field(default="heads", init=False, repr=False)

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of these yes-or-no questions, for
        `word_tokenizer`."""
        question = wei_question([("", True), ("", False)])
        words = [question.text, *ANSWERS, *self.names, "heads tails", SHOT_SEPARATOR * bool(self.shots)]
        return vocabulary_of(words)

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`: that of `CoinFlip`, in the wording of Wei et al."""
        drawn = super().example(index, seed)
        shots = tuple(wei_question(shot.events) for shot in drawn.shots)
        return Example(wei_question(drawn.events), shots, self.chat)
