"""Converts examples to JSON records, files of such records and Hugging Face Datasets, and back. Datasets have the
columns of public coin-flip sets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from cacheprobe.tasks.base import Example, Question, Tokenizer
from cacheprobe.tasks.coin_flip import coin_question
from cacheprobe.tasks.coin_flip_wei import parse_wei

if TYPE_CHECKING:
    from datasets import Dataset

FIELDS = {"text", "answer", "answers", "events", "states", "spans", "thoughts"}


Unchecked: TypeAlias = Any
"""A value read from JSON, whose type is not checked yet."""


def save_examples(path: str | Path, examples: Iterable[Example]) -> None:
    """Writes examples to a file of JSON lines: one line for each example, with the output of `example_record`."""
    lines = [json.dumps(example_record(example), ensure_ascii=False) + "\n" for example in examples]
    Path(path).write_text("".join(lines), encoding="utf-8", newline="\n")


def load_examples(path: str | Path) -> list[Example]:
    """Returns the list of examples in a file that `save_examples` wrote.

    Raises: ValueError for a file without examples, and with path and line for an invalid record, or a coin flip whose
    text and events disagree.
    """
    examples = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            examples.append(example_from_record(json.loads(line)))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}; write the file with save_examples") from error
    if not examples:
        raise ValueError(f"{path} holds no examples; write it with save_examples")
    return examples


def example_record(example: Example) -> dict[str, object]:
    """Returns an example as a dictionary that can be stored as JSON; `example_from_record` reads it.

    Keys for the task coin_flip: prompt, answer, events, states. For other tasks, the other coin flips among them:
    question, with all fields of `Question`.
    Also shots and chat, if the example has worked examples or is a chat.
    """
    if all(map(_is_coin_flip, (example.question, *example.shots))):
        record: dict[str, object] = {
            "prompt": example.prompt,
            "answer": example.answer,
            "events": example.events,
            "states": example.states,
        }
        shots = [{"events": shot.events, "states": shot.states} for shot in example.shots]
    else:
        record = {"question": asdict(example.question)}
        shots = list(map(asdict, example.shots))
    if shots:
        record["shots"] = shots
    if example.chat:
        record["chat"] = True
    return record


def example_from_record(record: Unchecked) -> Example:
    """Returns the Example of a dictionary from `example_record`. Raises: ValueError for an invalid record, TypeError
    for a number in place of a list."""
    is_coin_flip = not isinstance(record, dict) or "question" not in record
    required = {"prompt", "answer", "events", "states"} if is_coin_flip else {"question"}
    _check_fields(record, required, {"shots", "chat"})
    shots, chat = record.get("shots", []), record.get("chat", False)
    if not is_coin_flip:
        return Example(_question_of(record["question"]), tuple(map(_question_of, shots)), chat)
    for shot in shots:
        _check_fields(shot, {"events", "states"}, set())
    example = Example(_coin_question_of(record), tuple(map(_coin_question_of, shots)), chat)
    for field in ("prompt", "answer"):
        if record[field] != getattr(example, field):
            raise ValueError(f"{field} is {record[field]!r}, but the events give {getattr(example, field)!r}")
    return example


def _is_coin_flip(question: Question) -> bool:
    """Returns True if `coin_question` makes an equal question from the initial state and the events."""
    if not all(len(event) == 2 and [type(part) for part in event] == [str, bool] for event in question.events):
        return False
    return (
        question.states[:1] in (("heads",), ("tails",))
        and coin_question(question.states[0], question.events) == question
    )


def _coin_question_of(record: Unchecked) -> Question:
    """Returns the coin-flip question with a record's events. Raises: ValueError if events and states disagree."""
    events, states = record["events"], tuple(record["states"])
    question = coin_question(states[0] if states else "", list(map(tuple, events)))
    if states != question.states:
        raise ValueError(f"states are {states}, but the events give {question.states}")
    return question


def _question_of(record: Unchecked) -> Question:
    """Returns the Question with a record's fields. Raises: ValueError if a field is missing, unknown or wrong."""
    _check_fields(record, FIELDS, set())
    return Question(**{field: _with_tuples(value) for field, value in record.items()})


def _with_tuples(value: Unchecked) -> Unchecked:
    """Returns `value` with every list converted to a tuple, at any depth."""
    return tuple(map(_with_tuples, value)) if isinstance(value, (list, tuple)) else value


def _check_fields(record: object, required: set[str], optional: set[str]) -> None:
    """Raises: ValueError unless `record` is a dictionary with all `required` keys, and with others only from
    `optional`."""
    keys = set(record) if isinstance(record, dict) else set()
    if not required <= keys <= required | optional:
        raise ValueError(f"expected an object with {sorted(required)}, perhaps {sorted(optional)}, got {record!r:.80}")


EXAMPLE = "example"


def to_dataset(examples: Sequence[Example], tokenizer: Tokenizer | None = None) -> Dataset:
    """Returns a Hugging Face Dataset with one row for each example: prompt, answer and true states.

    inputs: the text that the model reads; examples with `chat` need the tokenizer.  targets: the answer, without
    leading space. The public set skrishna/coin_flip has the same two columns.
    states: the true state after 0, 1, ... operations.
    operations: the text of each operation.
    example: the complete example as JSON, which `from_dataset` reads.
    names, flips: who acts, and whether they flip; only if all examples are flips of one coin.
    """
    from datasets import Dataset

    if not examples:
        raise ValueError("no examples to export; give at least one")
    columns: dict[str, list] = {
        "inputs": [example.prompt_text(tokenizer) for example in examples],
        "targets": [example.answer.strip() for example in examples],
        "states": [list(example.states) for example in examples],
        "operations": [
            [example.question.text[start:end] for start, end in example.question.spans[1:]] for example in examples
        ],
        EXAMPLE: [json.dumps(example_record(example), ensure_ascii=False) for example in examples],
    }
    if all([type(part) for part in event] == [str, bool] for example in examples for event in example.events):
        columns["names"] = [[name for name, _ in example.events] for example in examples]
        columns["flips"] = [[flipped for _, flipped in example.events] for example in examples]
    return Dataset.from_dict(columns)


def from_dataset(rows: Dataset) -> list[Example]:
    """Returns the list of examples in a Dataset: one from `to_dataset`, or one of public coin-flip questions.

    A public set, such as skrishna/coin_flip, has only `inputs` and `targets`: is a coin still heads up, yes or no? Its
    texts stay as they are, but white space at the end is cut and a missing "A:" added. Other columns are not read.
    Raises: ValueError for a missing column, for no rows, and with the row's index for a row that is not a question of
    these kinds, or whose columns contradict each other.
    """
    missing = {"inputs", "targets"} - set(rows.column_names)
    if missing:
        raise ValueError(f"the set has no column {sorted(missing)}; it has {sorted(rows.column_names)}")
    records = rows[EXAMPLE] if EXAMPLE in rows.column_names else repeat(None)
    examples = []
    for index, (text, target, record) in enumerate(zip(rows["inputs"], rows["targets"], records, strict=False)):
        if not isinstance(text, str) or not isinstance(target, str):
            raise ValueError(f"row {index}: inputs and targets must be texts, got {text!r} and {target!r}")
        try:
            example = Example(parse_wei(text)) if record is None else example_from_record(json.loads(record))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"row {index}: {error}") from error
        if target.strip().lower() != example.answer.strip().lower():
            raise ValueError(f"row {index}: {text!r} has the target {target!r}, but gives {example.answer.strip()!r}")
        if record is not None and not example.chat and text != example.prompt:
            raise ValueError(f"row {index}: the inputs {text!r} are not the example's {example.prompt!r}")
        examples.append(example)
    if not examples:
        raise ValueError("the set has no rows")
    return examples
