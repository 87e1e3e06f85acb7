"""Generates coin-flip questions: people flip a coin or do not, and the question is which side it shows; also among
filler words.

Source: the task is that of Wei et al. 2022, arXiv 2201.11903; the wording follows Thinking States, arXiv 2602.08332.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.core.values import flag, require_one_of, whole_number
from cacheprobe.tasks.base import SHOT_SEPARATOR, Example, Question, Tokenizer
from cacheprobe.tasks.drawing import (
    FILLERS,
    NAMES,
    CountedTask,
    Writer,
    balanced_side,
    draw,
    filler,
    require_names,
    require_probability,
)
from cacheprobe.tasks.words import split_words, vocabulary_of

STATES = ("heads", "tails")
ANSWERS = (" heads", " tails")
CLOSING = "What's the state? A:"


def turned(side: str) -> str:
    """Returns the other side of a coin: "tails" for "heads", and "heads" for "tails"."""
    return STATES[1 - STATES.index(side)]


def coin_question(initial: str, events: Sequence[tuple[str, bool]]) -> Question:
    """Returns the Question for a coin that starts as `initial` ("heads" or "tails"), after `events`.

    events: (name, True if the person flips the coin), one or more.
    """
    require_one_of("initial state", initial, STATES)
    if not events:
        raise ValueError("a coin question needs at least one event, such as ('Alice', True)")
    writer, states = Writer(), [initial]
    writer.mark(f"A coin's state is {initial}")
    for name, flipped in events:
        writer.say(", then " if len(states) > 1 else ". ")
        writer.mark(f"{name} flips" if flipped else f"{name} does not flip")
        states.append(turned(states[-1]) if flipped else states[-1])
    writer.say(f". {CLOSING}")
    return writer.question(f" {states[-1]}", ANSWERS, list(map(tuple, events)), states)


def flip_chance(flip_probability: float, remaining: int, odd: bool) -> float:
    """Returns the probability that the first of `remaining` people flips, given the parity of the number of flips.

    odd: True if an odd number of the `remaining` people flip. Without this condition, each person would flip
    independently with `flip_probability`, strictly between 0 and 1.
    Twin: products of the chances of single flips, in tests.tasks.test_data.
    """
    stay_probability = 1 - flip_probability
    even_chance, odd_chance = 1.0, 0.0  # parity of the flips of all people after the first
    for _ in range(remaining - 1):
        even_chance, odd_chance = (
            even_chance * stay_probability + odd_chance * flip_probability,
            odd_chance * stay_probability + even_chance * flip_probability,
        )
    flips = flip_probability * (even_chance if odd else odd_chance)
    stays = stay_probability * (odd_chance if odd else even_chance)
    return flips / (flips + stays)


@dataclass(frozen=True)
class CoinTask(CountedTask):
    """Implements what all coin tasks share: each of `people` is one operation, and there are two possible answers."""

    counted: ClassVar[str] = "people"

    @property
    def chance(self) -> float:
        """Accuracy of a uniform guess between the two answers: 0.5."""
        return 0.5

    @property
    def answers_balanced_over(self) -> int:
        """Size of the groups of consecutive examples with balanced answers: 2, or 1 if `balanced` is False."""
        return 2 if getattr(self, "balanced", True) else 1


@register("tasks", "coin_flip")
@dataclass(frozen=True)
class CoinFlip(CoinTask):
    """Generates coin-flip questions: `people` with random names each flip the coin, or do not.

    flip_probability: probability that a person flips; `balanced` together with a fixed `initial` changes it.
    initial: side at the start: "heads", "tails", or "random".
    balanced: exactly half of the examples have the answer heads (for an odd n, one more or one fewer). Of examples 0
    and 1, 2 and 3, ..., one has the answer heads and one tails, in random order. The chosen answer is reached in one of
    two ways:
    - initial="random": the flips are drawn first, exactly Bernoulli, then the initial state that gives the answer.
    - a fixed initial: the flips are drawn given that their number is odd (or even). With one person, the answer decides
    the flip; in general the share of flips equals `flip_probability` only if that is 0.5.
    If not balanced, flips are Bernoulli, a random initial state is a fair coin, and both determine the answer.
    shots: number of worked examples before the question, drawn for each example by the same rules, if `distinct` with
    names that the question does not use.
    chat: the model reads the example in a chat template, with the worked examples as earlier turns.
    The question does not depend on `shots` and `chat`. With few people and many examples, questions repeat. Sets with
    one seed and different other settings share random draws: for independent sets, use different seeds.
    distinct: no name occurs twice in a question. Otherwise each name is any of `names`, also in the worked examples, so
    there can be more people than names.
    """

    people: int = 2
    flip_probability: float | int = 0.5
    initial: str = "random"
    balanced: bool = True
    shots: int = 0
    chat: bool = False
    names: Sequence[str] = NAMES
    distinct: bool = True

    def __post_init__(self) -> None:
        whole_number("people", self.people, at_least=1)
        whole_number("shots", self.shots, at_least=0)
        flag("distinct", self.distinct)
        require_probability("flip_probability", self.flip_probability)
        require_one_of("initial", self.initial, ("random", *STATES))
        if self.balanced and self.initial != "random" and self.flip_probability in (0, 1):
            raise ValueError(
                f"balanced=True cannot be had with initial={self.initial!r} and "
                f"flip_probability={self.flip_probability!r}, where every answer is the same; "
                "use initial='random' or balanced=False"
            )
        needed = self.people * (2 if self.shots else 1) if self.distinct else 1
        others = ", as shots take other people than the question" if self.shots else ""
        why = f"people={self.people} needs {needed} names{others}"
        require_names(self.names, needed, why, "give more names or fewer people, or distinct=False")

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of the coin-flip texts, for `word_tokenizer`."""
        phrases = (coin_question(state, [("", True), ("", False)]) for state in STATES)
        return vocabulary_of([*(q.text + q.answer for q in phrases), *self.names, SHOT_SEPARATOR * bool(self.shots)])

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`: a question, with `shots` worked examples before."""
        key = f"coin_flip/{seed}"
        question = self._question(key, index, self.names)
        others = self.names
        if self.shots and self.distinct:
            used = {name for name, _ in question.events}
            others = [name for name in self.names if name not in used]
        shots = tuple(self._question(f"{key}/{index}/shots", shot, others) for shot in range(self.shots))
        return Example(question, shots, self.chat)

    def _question(self, key: str, index: int, names: Sequence[str]) -> Question:
        """Returns question number `index` of the random stream `key`, with people drawn from `names`."""
        rng = Random(f"{key}/{index}")  # a string seed, and rng.random() alone: the same on every Python
        drawn_names = draw(rng, names, self.people, self.distinct)
        if not self.balanced:
            initial = STATES[rng.random() < 0.5] if self.initial == "random" else self.initial
            return coin_question(initial, [(name, rng.random() < self.flip_probability) for name in drawn_names])
        answer = STATES[balanced_side(key, index)]
        if self.initial == "random":
            events = [(name, rng.random() < self.flip_probability) for name in drawn_names]
            odd = sum(flipped for _, flipped in events) % 2
            return coin_question(STATES[STATES.index(answer) ^ odd], events)
        events, odd = [], answer != self.initial  # odd: whether the people who are left flip an odd number of times
        for remaining, name in zip(range(self.people, 0, -1), drawn_names, strict=True):
            events.append((name, rng.random() < flip_chance(self.flip_probability, remaining, odd)))
            odd ^= events[-1][1]
        return coin_question(self.initial, events)


def answer_token_ids(tokenizer: Tokenizer, *, chat: bool = False) -> tuple[int, ...]:
    """Returns the ids of the first tokens of the answers heads and tails, as encoded directly after a question.

    Raises: ValueError if both answers begin with the same token, or the tokenizer joins an answer to the token before;
    with `chat`, also for a tokenizer without a chat template.
    """
    return Example(coin_question("heads", [("Alice", True)]), chat=chat).answer_token_ids(tokenizer)


@register("tasks", "coin_flip_sparse")
@dataclass(frozen=True)
class CoinFlipSparse(CoinTask):
    """Generates coin-flip questions among filler words; about the share `density` of the chunks has an operation.

    chunk: number of tokens of the word tokenizer that a Thinking States model reads at a time.
    The prompt is whole chunks: first those of the opening statement, then round(people / density) chunks, then those of
    the question. Of the middle chunks, `people`, drawn at random, begin with an operation, and so have a thought (form
    "state"). All other tokens are filler words and full stops. At density=1, every middle chunk has an operation.
    Coins, people and flips are those of `CoinFlip(distinct=False)` with the same seed and settings.
    """

    people: int = 4
    density: float | int = 0.25
    chunk: int = 8
    flip_probability: float | int = 0.5
    names: Sequence[str] = NAMES

    def __post_init__(self) -> None:
        self._coin()
        require_probability("density", self.density)
        if not self.density > 0:
            raise ValueError("density=0 would leave no room for an operation; give a share above 0, such as 0.05")
        longest = max((len(split_words(f"{name} does not flip.")) for name in self.names), default=0)
        whole_number("chunk", self.chunk, at_least=longest)

    def _coin(self) -> CoinFlip:
        return CoinFlip(self.people, flip_probability=self.flip_probability, names=self.names, distinct=False)

    def vocabulary(self) -> tuple[str, ...]:
        """Returns the sorted tuple of all words and punctuation marks of these coin-flip texts, fillers included, for
        `word_tokenizer`."""
        words = f"A coin's state is {' '.join(STATES)}. flips does not flip. {CLOSING}"
        return vocabulary_of([words, *self.names, *FILLERS])

    def example(self, index: int, seed: int = 0) -> Example:
        """Returns Example number `index` of seed `seed`: a question of `CoinFlip`, with filler words put in."""
        question = self._coin().example(index, seed).question
        rng = Random(f"coin_flip_sparse/{seed}/{index}")
        num_chunks = max(round(self.people / self.density), self.people)
        with_operation = set(draw(rng, range(num_chunks), self.people))
        clauses = [question.text[start:end] for start, end in question.spans]
        writer = Writer()
        for chunk in range(-1, num_chunks):  # -1: the opening statement, which may take several chunks
            words = clauses.pop(0) if chunk < 0 or chunk in with_operation else ""
            # words, filler words and the full stop fill whole chunks
            sentence = filler(rng, -(len(split_words(words)) + 1) % self.chunk) + ". "
            if words:
                writer.mark(words)
            writer.say(sentence if words else sentence.lstrip(" "))
        num_missing = -len(split_words(CLOSING)) % self.chunk
        if num_missing:
            count = num_missing - 1 or self.chunk  # no full stop without a word: if one token is missing, add a chunk
            writer.say(filler(rng, count).lstrip(" ") + ". ")
        writer.say(CLOSING)
        return Example(replace(question, text=writer.text, spans=tuple(writer.spans)))
