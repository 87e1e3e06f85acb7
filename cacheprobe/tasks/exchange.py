"""Examples as `datasets`, in the fields of public coin-flip sets: out for any task, in for the words of Wei et al."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cacheprobe.tasks.base import Example, Tokenizer
from cacheprobe.tasks.coin_flip_wei import parse_wei

if TYPE_CHECKING:
    from datasets import Dataset


def to_dataset(examples: Sequence[Example], tokenizer: Tokenizer | None = None) -> Dataset:
    """A `datasets.Dataset` with `inputs` and `targets`, the fields of the public set skrishna/coin_flip, and the truth.

    inputs: the text the model reads (examples with `chat` need the tokenizer).  targets: the answer, without spaces.
    states: the true state after 0, 1, ... operations.  operations: the words of each operation.
    names, flips: who acts, and whether they flip; only where all examples are flips of one coin.
    """
    from datasets import Dataset

    if not examples:
        raise ValueError("no examples to export; give at least one")
    columns: dict[str, list] = {
        "inputs": [example.prompt_text(tokenizer) for example in examples],
        "targets": [example.answer.strip() for example in examples],
        "states": [list(example.states) for example in examples],
        "operations": [_operations(example) for example in examples],
    }
    if all([type(part) for part in event] == [str, bool] for example in examples for event in example.events):
        columns["names"] = [[name for name, _ in example.events] for example in examples]
        columns["flips"] = [[flipped for _, flipped in example.events] for example in examples]
    return Dataset.from_dict(columns)


def from_dataset(rows: Dataset) -> list[Example]:
    """Examples of rows with `inputs` and `targets`, as of skrishna/coin_flip: a coin that is heads up, yes or no.

    Texts are kept as they are, but for an "A:" at the end where there is none. A row that is no such question, or
    whose target is not what its sentences give, is refused with its index and text. Other columns are not read.
    """
    missing = {"inputs", "targets"} - set(rows.column_names)
    if missing:
        raise ValueError(f"the set has no column {sorted(missing)}; it has {sorted(rows.column_names)}")
    examples = []
    for index, (text, target) in enumerate(zip(rows["inputs"], rows["targets"], strict=True)):
        if not isinstance(text, str) or not isinstance(target, str):
            raise ValueError(f"row {index}: inputs and targets must be texts, got {text!r} and {target!r}")
        try:
            question = parse_wei(text)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
        if target.strip().lower() != question.answer.strip():
            raise ValueError(f"row {index}: {text!r} has the target {target!r}, but gives {question.answer.strip()!r}")
        examples.append(Example(question))
    if not examples:
        raise ValueError("the set has no rows")
    return examples


def _operations(example: Example) -> list[str]:
    text = example.question.text
    return [text[start:end] for start, end in example.question.spans[1:]]
