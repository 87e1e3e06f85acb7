"""Tasks: questions whose true state is known after every token."""

from cacheprobe.tasks.base import Accuracy, Example, Question, Rendering, accuracy, parse_answer
from cacheprobe.tasks.coin_flip import (
    CoinFlip,
    answer_token_ids,
    coin_question,
    example_from_record,
    example_record,
    load_examples,
    save_examples,
    to_dataset,
)

__all__ = [
    "Accuracy",
    "CoinFlip",
    "Example",
    "Question",
    "Rendering",
    "accuracy",
    "answer_token_ids",
    "coin_question",
    "example_from_record",
    "example_record",
    "load_examples",
    "parse_answer",
    "save_examples",
    "to_dataset",
]
