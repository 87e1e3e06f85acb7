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
from cacheprobe.tasks.drawing import Task, mixed
from cacheprobe.tasks.people import HELD_OUT_NAMES, NAMES, TRAIN_NAMES
from cacheprobe.tasks.thoughts import FORMATS, Annotated, annotate, annotate_all
from cacheprobe.tasks.words import encode_strictly, load_tokenizer, save_tokenizer, word_tokenizer

__all__ = [
    "FORMATS",
    "HELD_OUT_NAMES",
    "NAMES",
    "TRAIN_NAMES",
    "Accuracy",
    "Annotated",
    "CoinFlip",
    "Example",
    "Question",
    "Rendering",
    "Task",
    "accuracy",
    "annotate",
    "annotate_all",
    "answer_token_ids",
    "coin_question",
    "encode_strictly",
    "example_from_record",
    "example_record",
    "load_examples",
    "load_tokenizer",
    "mixed",
    "parse_answer",
    "save_examples",
    "save_tokenizer",
    "to_dataset",
    "word_tokenizer",
]
