"""Generates questions on two coins: people flip either coin, and the question is which side one of the coins shows.

Source: Amos et al. 2026, Thinking States, arXiv 2602.08332, on state ambiguity: if the question comes last, a thought
cannot know which quantity will matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cacheprobe.core.registry import register
from cacheprobe.core.values import flag, require_one_of, whole_number
from cacheprobe.tasks.base import Example, Question
from cacheprobe.tasks.coin_flip import ANSWERS, STATES, CoinTask, turned
from cacheprobe.tasks.drawing import (
    NAMES,
    Writer,
    balanced_side,
    draw,
    pick,
    require_names,
    require_probability,
)
from cacheprobe.tasks.words import vocabulary_of

COINS = ("red", "blue")
SAYS = ("both", "named", "asked")


def two_coins_question(
    initial: Sequence[str],
    events: Sequence[tuple[str, str, bool]],
    asked: str,
    says: str = "both",
    question_first: bool = False,
) -> Question:
    """Returns the Question for the side of the coin `asked` ("red" or "blue"), after `events`.

    initial: sides of the red and the blue coin at the start.  events: (name, coin, True if the person flips the coin).
    says, question_first: as in `TwoCoins`.
    """
    sides: dict[str, str] = dict(zip(COINS, initial, strict=True))
    question = f"What's the {asked} coin's state?"
    writer = Writer(f"{question} " if question_first else "")
    writer.mark(f"The red coin is {sides['red']} and the blue coin is {sides['blue']}")
    states = [f"{sides['red']} {sides['blue']}"]
    thoughts = [sides[asked] if says == "asked" else states[0]]
    for name, coin, flipped in events:
        writer.say(", then " if len(states) > 1 else ". ")
        writer.mark(f"{name} flips {coin}" if flipped else f"{name} does not flip {coin}")
        sides[coin] = turned(sides[coin]) if flipped else sides[coin]
        states.append(f"{sides['red']} {sides['blue']}")
        thoughts.append({"both": states[-1], "named": f"{coin} {sides[coin]}", "asked": sides[asked]}[says])
    writer.say(". A:" if question_first else f". {question} A:")
    return writer.question(f" {sides[asked]}", ANSWERS, events, states, () if says == "both" else thoughts)


@register("tasks", "two_coins")
@dataclass(frozen=True)
class TwoCoins(CoinTask):
    """Generates questions on a red and a blue coin: `people` each flip one coin, or do not; one coin is asked about.

    Of examples 0 and 1, 2 and 3, ..., one has the answer heads and one tails.
    question_first: True puts the question before the story, False after it. Equal seeds give equal stories for both.
    says: the thought after each operation: the state of "both" coins, of the coin "named" in the operation ("red
    tails"), or of the coin that is "asked" about, which is unknown until the question has been read.
    distinct: no name occurs twice in a question.
    """

    people: int = 4
    flip_probability: float | int = 0.5
    says: str = "both"
    question_first: bool = False
    names: Sequence[str] = NAMES
    distinct: bool = True

    def __post_init__(self) -> None:
        whole_number("people", self.people, at_least=1)
        require_probability("flip_probability", self.flip_probability)
        require_one_of("says", self.says, SAYS)
        flag("question_first", self.question_first)
        flag("distinct", self.distinct)
        needed = self.people if self.distinct else 1
        why = f"people={self.people} needs {needed} names"
        require_names(self.names, needed, why, "give more names or fewer people, or distinct=False")

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of the texts about two coins, for
        `word_tokenizer`."""
        events = [("", coin, flipped) for coin in COINS for flipped in (True, False)]
        questions = [two_coins_question((side, side), events, coin) for side in STATES for coin in COINS]
        return vocabulary_of([*(question.text + question.answer for question in questions), *self.names])

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`: people, flips, sides and the coin in question are random."""
        key = f"two_coins/{seed}"
        rng = Random(f"{key}/{index}")
        asked = pick(rng, COINS)
        side_of_other = pick(rng, STATES)
        names = draw(rng, self.names, self.people, self.distinct)
        events = [(name, pick(rng, COINS), rng.random() < self.flip_probability) for name in names]
        side = STATES[balanced_side(key, index)]
        for _, coin, flipped in events:  # undoes the flips, from the answer to the side at the start
            side = turned(side) if flipped and coin == asked else side
        initial = [side if coin == asked else side_of_other for coin in COINS]
        return Example(two_coins_question(initial, events, asked, self.says, self.question_first))
