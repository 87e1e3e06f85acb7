"""Generates questions whose true state is known after every token, and scores the answers to them."""

from cacheprobe.tasks.base import Accuracy, Example, Question, Rendering, accuracy, accuracy_by, parse_answer
from cacheprobe.tasks.boxes import Boxes
from cacheprobe.tasks.coin_flip import CoinFlip, CoinFlipSparse, answer_token_ids, coin_question
from cacheprobe.tasks.coin_flip_wei import CoinFlipWei
from cacheprobe.tasks.drawing import HELD_OUT_NAMES, NAMES, TRAIN_NAMES, ListedTask, Task, mixed
from cacheprobe.tasks.files import (
    example_from_record,
    example_record,
    from_dataset,
    load_examples,
    save_examples,
    to_dataset,
)
from cacheprobe.tasks.permutations import Permutations
from cacheprobe.tasks.thoughts import CHAINS, FORMATS, Annotated, annotate, annotate_all
from cacheprobe.tasks.two_coins import TwoCoins
from cacheprobe.tasks.variables import Variables
from cacheprobe.tasks.words import encode_strictly, load_tokenizer, save_tokenizer, word_tokenizer

__all__ = [
    "CHAINS",
    "FORMATS",
    "HELD_OUT_NAMES",
    "NAMES",
    "TRAIN_NAMES",
    "Accuracy",
    "Annotated",
    "Boxes",
    "CoinFlip",
    "CoinFlipSparse",
    "CoinFlipWei",
    "Example",
    "ListedTask",
    "Permutations",
    "Question",
    "Rendering",
    "Task",
    "TwoCoins",
    "Variables",
    "accuracy",
    "accuracy_by",
    "annotate",
    "annotate_all",
    "answer_token_ids",
    "coin_question",
    "encode_strictly",
    "example_from_record",
    "example_record",
    "from_dataset",
    "load_examples",
    "load_tokenizer",
    "mixed",
    "parse_answer",
    "save_examples",
    "save_tokenizer",
    "to_dataset",
    "word_tokenizer",
]


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(__all__)
