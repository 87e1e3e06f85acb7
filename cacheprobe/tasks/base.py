"""Defines questions whose true state is known at each character (`Question`, `Example`), and scores answers."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from cacheprobe.core.tokens import tokens_after
from cacheprobe.ops.statistics import wilson

SHOT_SEPARATOR = "\n\n"


Event: TypeAlias = Any
"""One operation of a question, in the format of its task: ("Alice", True) if Alice flips the coin of a coin flip."""

Key = TypeVar("Key", bound="str | int | float | tuple[object, ...]")


@runtime_checkable
class Tokenizer(Protocol):
    """Lists the methods of a Hugging Face tokenizer that `Example` calls."""

    def __call__(self, text: str, **options: Any) -> Any:
        """Encodes a text; returns a mapping with `input_ids` and, if requested, `offset_mapping`."""
        ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> Any:
        """Returns the text of token ids."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """With tokenize=False, returns the messages of a conversation as one text in the chat format of a model."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """Holds one question about a state that changes along a text, its answer, and the true state after each operation.

    text: what the model reads, up to the answer.  answer: the right continuation, including its leading space.
    answers: all possible answers, including `answer`.  events: one for each operation, in the task's own format.
    states: the true state after 0, 1, ... operations; () with `events` and `spans` () if no state is known.
    spans: characters (start, end) of the words that set each of `states`: the statement of the initial state, then the
    operations. The state changes at the last character of its span.
    thoughts: for each of `states`, the text that a Thinking States model should write once the state holds, such as the
    part that changed. If empty, `states` is used.
    """

    text: str
    answer: str
    answers: tuple[str, ...]
    events: tuple[Event, ...]
    states: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    thoughts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_stateless = not (self.states or self.spans or self.events)
        if not is_stateless and not len(self.states) == len(self.spans) == len(self.events) + 1:
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
    """Holds the text that a model reads, and the true state at each of its characters.

    operations: (start, end) characters of each operation of the last question, which the model must answer.
    changes: (number of characters read, state from that number on), ascending; the state is None if none holds.
    """

    text: str
    operations: tuple[tuple[int, int], ...]
    changes: tuple[tuple[int, str | None], ...]

    def state_at(self, num_chars: int) -> str | None:
        """Returns the true state, as text, after the first `num_chars` characters of `text`; None if no state holds.
        Raises: ValueError for a number of characters below 0 or above the length of `text`."""
        if not 0 <= num_chars <= len(self.text):
            raise ValueError(f"num_chars={num_chars} is outside the text; give 0 to {len(self.text)}")
        index = bisect_right(self.changes, num_chars, key=lambda change: change[0])
        return self.changes[index - 1][1] if index else None


@dataclass(frozen=True, slots=True, repr=False)
class Example:
    """Holds one question and its worked examples (`shots`): as a plain prompt, or with `chat` in a chat template.

    `prompt`, `operations` and `state_at` describe the text without a template and need no tokenizer. With `chat`, the
    model reads `prompt_text(tokenizer)`, and the answers have no leading space, because they start the reply.
    """

    question: Question
    shots: tuple[Question, ...] = ()
    chat: bool = False

    @property
    def prompt(self) -> str:
        """The prompt as text, without a chat template: the worked examples with their answers, then the question."""
        return "".join(shot.text + shot.answer + SHOT_SEPARATOR for shot in self.shots) + self.question.text

    @property
    def answer(self) -> str:
        """The right answer as text: with its leading space, or without if `chat`."""
        return self.question.answer.strip() if self.chat else self.question.answer

    @property
    def answers(self) -> tuple[str, ...]:
        """All possible answers as texts: with their leading spaces, or without if `chat`."""
        return tuple(answer.strip() for answer in self.question.answers) if self.chat else self.question.answers

    @property
    def events(self) -> tuple[Event, ...]:
        """The operations of the question, in the format of the task: ("Alice", True) if Alice flips the coin.
        (`operations` has the characters of their words.)"""
        return self.question.events

    @property
    def states(self) -> tuple[str, ...]:
        """The true states of the question, as texts, after 0, 1, ... operations."""
        return self.question.states

    @property
    def operations(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the words of each operation of the question, as character indices in `prompt`; `end` is
        excluded."""
        return self._placed_in(self.prompt).operations

    def state_at(self, num_chars: int) -> str | None:
        """Returns the true state, as text, after the first `num_chars` characters of `prompt`.

        The state is None until the first question has stated its initial state, and after a worked example's answer
        until the next question has stated its initial state.
        Raises: ValueError for a number of characters below 0 or above the length of `prompt`.
        """
        return self._placed_in(self.prompt).state_at(num_chars)

    def prompt_text(self, tokenizer: Tokenizer | None = None) -> str:
        """Returns the text that the model reads: `prompt`, or with `chat` the conversation in the chat template.

        Worked examples are earlier turns of the conversation. Only `chat` needs the tokenizer.
        Raises: ValueError if `chat` is set and no tokenizer with a chat template is given.
        """
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
        """Returns a Rendering: the text of `prompt_text`, with the true state at each character.

        The state is None until the first question has stated its initial state, and after a worked example's answer
        until the next question has stated its initial state. After the last operation, the final state holds.
        Raises: ValueError as `prompt_text` does, or if the chat template changes a question or a worked answer.
        """
        return self._placed_in(self.prompt_text(tokenizer))

    def states_after_tokens(self, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> list[str | None]:
        """Returns the list of true states (text or None), one after each token of `prompt_text`.

        A new state holds from the token that completes the operation's words on (" fl", "ips": at "ips"), even if that
        token contains further characters. Tokens that `add_special_tokens` adds do not change the state.
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
        """Returns two lists: the token ids of `prompt_text`, and the index of the token that completes each operation
        of the question. Operations of worked examples are not included.

        Raises: ValueError for a tokenizer without character offsets, or with `chat` without a chat template.
        """
        rendering = self.rendering(tokenizer)
        ids, ends = _with_ends(tokenizer, rendering.text, add_special_tokens)
        return ids, [next(i for i, reached in enumerate(ends) if reached >= end) for _, end in rendering.operations]

    def answer_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Returns the id of the first token of each possible answer, as encoded directly after the prompt.

        Raises: ValueError if two answers begin with the same token, if the tokenizer joins an answer to the prompt's
        last token, and for an answer with a word that it does not know.
        """
        ids_of = tokens_after(
            self.prompt_text(tokenizer),
            lambda text: tokenizer(text, add_special_tokens=False)["input_ids"],
            tokenizer.decode,
        )
        first = [ids_of(answer)[0] for answer in self.answers]
        if len(set(first)) < len(first):
            raise ValueError(
                f"{_name(tokenizer)} starts the answers {self.answers} with the same token ({first}); "
                "cp.analysis.answer_logprobs scores whole answers"
            )
        return tuple(first)

    def _placed_in(self, text: str) -> Rendering:
        """Returns a Rendering of `text`, with the true state at each character. Raises: ValueError if a question or
        worked answer is missing from `text`."""
        changes: list[tuple[int, str | None]] = []
        cursor = start = 0
        for index, question in enumerate((*self.shots, self.question)):
            start = _find(text, question.text, cursor)
            changes += [(start + end, state) for (_, end), state in zip(question.spans, question.states, strict=True)]
            cursor = start + len(question.text)
            if index < len(self.shots):
                cursor = _find(text, question.answer.strip(), cursor) + len(question.answer.strip())
                changes.append((cursor + 1, None))  # the final state holds to the end of the answer
        operations = tuple((start + first, start + end) for first, end in self.question.spans[1:])
        return Rendering(text, operations, tuple(changes))

    def __repr__(self) -> str:
        asides = f", shots={len(self.shots)}" * bool(self.shots) + ", chat=True" * self.chat
        return f"Example({self.question.text!r} -> {self.answer!r}{asides})"


def _with_ends(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
    """Returns two lists: the token ids of `text`, and the character index after the end of each token."""
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=add_special_tokens)
    if "offset_mapping" not in encoded:
        raise ValueError(f"{_name(tokenizer)} gives no character offsets; load a fast tokenizer")
    return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]


def _find(text: str, part: str, start: int) -> int:
    """Returns the first index from `start` on at which `part` begins in `text`. Raises: ValueError without one."""
    found = text.find(part, start)
    if found < 0:
        raise ValueError(f"the chat template does not show this text unchanged: {part!r}; use chat=False")
    return found


def _name(tokenizer: Tokenizer | None) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def after_reasoning(text: str) -> str:
    """Returns the part of a generated text that is no reasoning: after the last </think>, and before a <think> that
    does not end."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def parse_answer(text: str, words: Sequence[str] = ("heads", "tails")) -> str | None:
    """Returns the answer in a generated text: the one of `words` that occurs first; None if none of `words` occurs.

    Only whole words count; upper and lower case are equal. If two of `words` begin at one place, the one listed first
    is returned.
    """
    groups = "|".join(f"({re.escape(word)})" for word in words)
    found = re.search(rf"\b(?:{groups})\b", text, re.IGNORECASE)
    return words[found.lastindex - 1] if found and found.lastindex else None


@dataclass(frozen=True, slots=True, repr=False)
class Accuracy:
    """Holds the number of right answers among generated texts. A text without a possible answer counts as wrong."""

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
        """Share of right answers, from 0 to 1."""
        return self.num_correct / self.num_examples

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % score interval of the accuracy, as (low, high) from 0 to 1."""
        return wilson(self.accuracy, self.num_examples)

    def __repr__(self) -> str:
        low, high = self.interval
        return (
            f"Accuracy({self.num_correct} of {self.num_examples} = {self.accuracy:.3f}, 95 % {low:.3f} to {high:.3f}; "
            f"{self.num_unparsed} unparsed; chance {self.chance:.2f})"
        )


def accuracy_by(
    examples: Sequence[Example], texts: Sequence[str], group: Callable[[Example], Key]
) -> dict[Key, Accuracy]:
    """Groups the examples by `group(example)`. Returns a dictionary from each group to its Accuracy, in ascending
    order.

    texts: what the model generated after each example's prompt.  group: for one, `lambda example: len(example.events)`.
    Raises: ValueError without examples, and for another number of texts.
    """
    if not examples or len(examples) != len(texts):
        raise ValueError(f"give one text for each of one or more examples, got {len(examples)} and {len(texts)}")
    pairs = defaultdict(list)
    for example, text in zip(examples, texts, strict=True):
        pairs[group(example)].append((example, text))
    return {key: accuracy(*map(list, zip(*pairs[key], strict=True))) for key in sorted(pairs)}


def accuracy(examples: Sequence[Example], texts: Sequence[str]) -> Accuracy:
    """Returns the Accuracy of `texts`: for each example, what a model generated after the prompt, without the prompt.

    Reasoning between <think> and </think> holds no answer.

    Raises: ValueError if the examples differ in their possible answers, or without one text for each example.
    """
    if not examples or len(examples) != len(texts):
        raise ValueError(f"give one text for each of one or more examples, got {len(examples)} and {len(texts)}")
    choices = {example.question.answers for example in examples}
    if len(choices) > 1:
        raise ValueError(f"examples with different answers have no common chance: {sorted(choices)}; score them apart")
    words = [answer.strip() for answer in choices.pop()]
    given = [parse_answer(after_reasoning(text), words) for text in texts]
    right = [word == example.answer.strip() for word, example in zip(given, examples, strict=True)]
    return Accuracy(len(right), sum(right), given.count(None), 1 / len(words))
