"""Converts examples to a Hugging Face Dataset and back, with the columns of public coin-flip sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from cacheprobe.tasks.base import Example, Tokenizer
from cacheprobe.tasks.coin_flip_wei import parse_wei

if TYPE_CHECKING:
    from datasets import Dataset
from cacheprobe.tasks.files import example_from_record, example_record

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
