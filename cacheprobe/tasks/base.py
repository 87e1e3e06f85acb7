"""Questions with a known running state: the text, the true state at each character, and how answers are scored."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Protocol, runtime_checkable

SHOT_SEPARATOR = "\n\n"


@runtime_checkable
class Tokenizer(Protocol):
    """What an example asks of a Hugging Face tokenizer."""

    def __call__(self, text: str, **options: Any) -> Any: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a state that changes while it is read.

    text: as the model reads it, up to the place of the answer.  answer: what follows, its leading space included.
    answers: all that can follow, `answer` among them.  events: one per operation, in the task's own terms.
    states: the true state after 0, 1, ... operations.
    spans: characters (start, end) of the words that set each of `states`: the statement of the initial one, then the
    operations. The state changes on the last character of its span, and not before.
    thoughts: what there is to say once each of `states` holds, such as the part that changed; `states` where empty.
    """

    text: str
    answer: str
    answers: tuple[str, ...]
    events: tuple[Any, ...]
    states: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    thoughts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.states) == len(self.spans) == len(self.events) + 1:
            raise ValueError(
                f"{self.text!r}: {len(self.events)} events need one state and one span more, "
                f"got {len(self.states)} states and {len(self.spans)} spans"
            )
        if self.thoughts and len(self.thoughts) != len(self.states):
            raise ValueError(f"{self.text!r}: {len(self.states)} states need one thought each, got {self.thoughts}")
        bounds = [0, *(bound for span in self.spans for bound in span), len(self.text)]
        if bounds != sorted(bounds):
            raise ValueError(f"{self.text!r}: spans must lie in order inside the text, got {self.spans}")
        if self.answer not in self.answers:
            raise ValueError(f"{self.text!r}: answer {self.answer!r} is not one of {self.answers}")


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text a model reads, with the true state at each place.

    operations: (start, end) characters of each operation of the asked question.
    changes: (characters read, state from there on), ascending; None where no state holds.
    """

    text: str
    operations: tuple[tuple[int, int], ...]
    changes: tuple[tuple[int, str | None], ...]

    def state_at(self, num_chars: int) -> str | None:
        """The true state once the first `num_chars` characters of `text` have been read."""
        if not 0 <= num_chars <= len(self.text):
            raise ValueError(f"num_chars={num_chars} is outside the text; give 0 to {len(self.text)}")
        index = bisect_right(self.changes, num_chars, key=lambda change: change[0])
        return self.changes[index - 1][1] if index else None


@dataclass(frozen=True, slots=True, repr=False)
class Example:
    """A question as it is put to a model, behind `shots` worked ones; `chat` wraps it in the model's own template.

    `prompt`, `operations` and `state_at` speak of the text without a template and need no tokenizer. With `chat`, what
    the model reads is `prompt_text(tokenizer)`, and the answers lose their leading space: they start the reply.
    """

    question: Question
    shots: tuple[Question, ...] = ()
    chat: bool = False

    @property
    def prompt(self) -> str:
        """The whole text, shots included, without a chat template."""
        return "".join(shot.text + shot.answer + SHOT_SEPARATOR for shot in self.shots) + self.question.text

    @property
    def answer(self) -> str:
        return self.question.answer.strip() if self.chat else self.question.answer

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(answer.strip() for answer in self.question.answers) if self.chat else self.question.answers

    @property
    def events(self) -> tuple[Any, ...]:
        return self.question.events

    @property
    def states(self) -> tuple[str, ...]:
        """The true state of the asked question after 0, 1, ... operations."""
        return self.question.states

    @property
    def operations(self) -> tuple[tuple[int, int], ...]:
        """Characters (start, end) of `prompt` that state each operation of the asked question."""
        return self._placed_in(self.prompt).operations

    def state_at(self, num_chars: int) -> str | None:
        """The true state once the first `num_chars` characters of `prompt` have been read; see `rendering`."""
        return self._placed_in(self.prompt).state_at(num_chars)

    def prompt_text(self, tokenizer: Tokenizer | None = None) -> str:
        """The text given to the model. Only `chat` needs the tokenizer; shots are then earlier turns of the chat."""
        if not self.chat:
            return self.prompt
        if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"chat=True, but {_name(tokenizer)} has no chat template; use chat=False, or give a tokenizer with one"
            )
        turns = []
        for shot in self.shots:
            turns += [{"role": "user", "content": shot.text}, {"role": "assistant", "content": shot.answer.strip()}]
        turns.append({"role": "user", "content": self.question.text})
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)

    def rendering(self, tokenizer: Tokenizer | None = None) -> Rendering:
        """`prompt_text` with the true state at each character.

        None before the initial state of the first question is fully stated and between questions; inside a shot, its
        answer included, that shot's own running state; from the last operation on, the final state.
        """
        return self._placed_in(self.prompt_text(tokenizer))

    def states_after_tokens(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> list[str | None]:
        """For each token of `prompt_text`, the true state after that token has been read.

        A change takes effect on the token that completes its words (" fl", "ips": on "ips"), also where that token
        holds more than them. Special tokens that the tokenizer adds leave the state as it is.
        """
        rendering = self.rendering(tokenizer)
        states, num_chars = [], 0
        for end in _with_ends(tokenizer, rendering.text, add_special_tokens)[1]:
            num_chars = max(num_chars, end)  # an added special token has the offsets (0, 0), wherever it stands
            states.append(rendering.state_at(num_chars))
        return states

    def completing_tokens(
        self, tokenizer: Tokenizer, *, add_special_tokens: bool = False
    ) -> tuple[list[int], list[int]]:
        """Token ids of `prompt_text`, and for each operation the place among them of the one that completes its words.

        Raises: ValueError for a tokenizer without character offsets.
        """
        rendering = self.rendering(tokenizer)
        ids, ends = _with_ends(tokenizer, rendering.text, add_special_tokens)
        return ids, [next(i for i, reached in enumerate(ends) if reached >= end) for _, end in rendering.operations]

    def answer_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The first token of each of `answers`, as it is encoded right after the prompt; they must differ."""
        prompt_text = self.prompt_text(tokenizer)
        prompt_ids = list(tokenizer(prompt_text, add_special_tokens=False)["input_ids"])
        first = []
        for answer in self.answers:
            ids = list(tokenizer(prompt_text + answer, add_special_tokens=False)["input_ids"])
            if ids[: len(prompt_ids)] != prompt_ids or len(ids) == len(prompt_ids):
                raise ValueError(
                    f"{_name(tokenizer)} joins {answer!r} to the prompt's last token; score the generated text instead"
                )
            first.append(ids[len(prompt_ids)])
        if len(set(first)) < len(first):
            raise ValueError(
                f"{_name(tokenizer)} starts the answers {self.answers} with the same token ({first}); "
                "score the generated text instead"
            )
        return tuple(first)

    def _placed_in(self, text: str) -> Rendering:
        changes: list[tuple[int, str | None]] = []
        cursor = start = 0
        for index, question in enumerate((*self.shots, self.question)):
            start = _find(text, question.text, cursor)
            changes += [(start + end, state) for (_, end), state in zip(question.spans, question.states, strict=True)]
            cursor = start + len(question.text)
            if index < len(self.shots):
                cursor = _find(text, question.answer.strip(), cursor) + len(question.answer.strip())
                changes.append((cursor + 1, None))
        operations = tuple((start + first, start + end) for first, end in self.question.spans[1:])
        return Rendering(text, operations, tuple(changes))

    def __repr__(self) -> str:
        asides = f", shots={len(self.shots)}" * bool(self.shots) + ", chat=True" * self.chat
        return f"Example({self.question.text!r} -> {self.answer!r}{asides})"


def _with_ends(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
    """Token ids of a text, and the character that each ends before."""
    try:
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=add_special_tokens)
    except NotImplementedError as error:
        raise ValueError(f"{_name(tokenizer)} gives no character offsets; load a fast tokenizer") from error
    return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]


def _find(text: str, part: str, start: int) -> int:
    """Where `part` begins in `text`, at or after `start`."""
    found = text.find(part, start)
    if found < 0:
        raise ValueError(f"the chat template does not show this text unchanged: {part!r}; use chat=False")
    return found


def _name(tokenizer: Tokenizer | None) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def parse_answer(text: str, words: Sequence[str] = ("heads", "tails")) -> str | None:
    """The first of `words` that stands in `text` as a whole word, in any case; None where none does."""
    groups = "|".join(f"({re.escape(word)})" for word in words)
    found = re.search(rf"\b(?:{groups})\b", text, re.IGNORECASE)
    return words[found.lastindex - 1] if found and found.lastindex else None


@dataclass(frozen=True, slots=True, repr=False)
class Accuracy:
    """How many generated texts give the right answer. A text that gives none counts as wrong."""

    num_examples: int
    num_correct: int
    num_unparsed: int
    chance: float

    def __post_init__(self) -> None:
        if not 0 <= self.num_correct <= self.num_examples - self.num_unparsed <= self.num_examples > 0:
            raise ValueError(
                f"{self.num_examples} examples cannot have {self.num_correct} correct and {self.num_unparsed} unparsed"
            )

    @property
    def accuracy(self) -> float:
        return self.num_correct / self.num_examples

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % score interval for the accuracy.  Source: Wilson 1927, "Probable inference"."""
        n, z = self.num_examples, NormalDist().inv_cdf(0.975)
        centre = self.accuracy + z * z / (2 * n)
        reach = z * (self.accuracy * (1 - self.accuracy) / n + z * z / (4 * n * n)) ** 0.5
        low, high = (centre - reach) / (1 + z * z / n), (centre + reach) / (1 + z * z / n)
        return max(0.0, min(low, self.accuracy)), min(1.0, max(high, self.accuracy))  # rounding put aside

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"Accuracy({self.num_correct} of {self.num_examples} = {self.accuracy:.3f}, 95 % {low:.3f} to {high:.3f}; "
            f"{self.num_unparsed} unparsed; chance {self.chance:.2f})"
        )


def accuracy_by(
    examples: Sequence[Example], texts: Sequence[str], group: Callable[[Example], Any]
) -> dict[Any, Accuracy]:
    """`accuracy` for each value that `group` gives, such as `lambda example: len(example.events)`, in their order."""
    if not examples or len(examples) != len(texts):
        raise ValueError(f"give one text for each of one or more examples, got {len(examples)} and {len(texts)}")
    rows = defaultdict(list)
    for example, text in zip(examples, texts, strict=True):
        rows[group(example)].append((example, text))
    return {key: accuracy(*map(list, zip(*rows[key], strict=True))) for key in sorted(rows)}


def accuracy(examples: Sequence[Example], texts: Sequence[str]) -> Accuracy:
    """Score what a model generated after each example's prompt. `texts` are the continuations, without the prompts."""
    if not examples or len(examples) != len(texts):
        raise ValueError(f"give one text for each of one or more examples, got {len(examples)} and {len(texts)}")
    choices = {example.question.answers for example in examples}
    if len(choices) > 1:
        raise ValueError(f"examples with different answers have no common chance: {sorted(choices)}; score them apart")
    words = [answer.strip() for answer in choices.pop()]
    given = [parse_answer(text, words) for text in texts]
    right = [word == example.answer.strip() for word, example in zip(given, examples, strict=True)]
    return Accuracy(len(right), sum(right), given.count(None), 1 / len(words))
