"""Measures how often a model answers coin-flip questions right, without and with a LoRA adapter."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.files import write_json
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import continue_texts
from cacheprobe.models.loaders import load_model
from cacheprobe.models.paths import choose_path
from cacheprobe.ops.sampling import lowest_argmax
from cacheprobe.tasks.base import Accuracy, accuracy
from cacheprobe.tasks.coin_flip import ANSWERS, CoinFlip, answer_token_ids
from cacheprobe.tasks.drawing import HELD_OUT_NAMES

PEOPLE = (1, 2, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class LoraScore:
    """Holds the results of a model on a set of coin-flip questions: counts for generated texts and for a forced choice
    (the likelier of the first tokens of heads and tails)."""

    people: int
    flip_probability: float
    questions: int
    distinct: int
    """Number of different questions in the set."""
    correct: int
    """Number of texts whose first "heads" or "tails" is right."""
    unparsed: int
    """Number of texts with neither "heads" nor "tails". Such texts count as wrong."""
    forced_correct: int
    """Number of questions for which the first token of the right word has a larger logit than that of the wrong
    word."""

    @property
    def accuracy(self) -> Accuracy:
        """Accuracy of the generated texts; chance is 0.5."""
        return Accuracy(self.questions, self.correct, self.unparsed, chance=0.5)

    @property
    def forced_accuracy(self) -> Accuracy:
        """Accuracy of a forced choice: the answer, heads or tails, whose first token has the larger logit."""
        return Accuracy(self.questions, self.forced_correct, 0, chance=0.5)

    def as_dict(self) -> dict[str, object]:
        """Returns a dictionary of all fields, and of both accuracies with the ends of Wilson's 95 % intervals."""
        figures: dict[str, object] = asdict(self)
        for name in ("accuracy", "forced_accuracy"):
            share: Accuracy = getattr(self, name)
            figures |= {name: share.accuracy, f"{name}_interval": [round(end, 4) for end in share.interval]}
        return figures

    @classmethod
    def from_dict(cls, stored: JsonDict) -> "LoraScore":
        """Returns the LoraScore that a dictionary from `as_dict` describes."""
        return cls(**{field.name: stored[field.name] for field in fields(cls)})


class Reply(NamedTuple):
    """Holds the reply of a model to a prompt: the generated text, and the choice between heads and tails."""

    text: str
    choice: int
    """0 if the first token of heads has the larger logit, 1 for tails; 0 if they are equal."""


def evaluate(
    model: CachedLM,
    people: Sequence[int] = PEOPLE,
    flip_probabilities: Sequence[float] = (0.5,),
    *,
    questions: int = 200,
    seed: int = 1,
    max_new_tokens: int = 8,
    names: Sequence[str] = HELD_OUT_NAMES,
) -> list[LoraScore]:
    """Runs a model on coin-flip questions; returns a list with a LoraScore for each pair of flip probability and number
    of people.

    The model answers greedily, without worked examples.  seed: of the questions.
    Raises: ValueError for an impossible task, such as more people than names.
    """
    cells = []
    for probability in flip_probabilities:
        for count in people:
            examples = CoinFlip(people=count, flip_probability=probability, names=names).examples(questions, seed)
            given = replies(model, [example.prompt for example in examples], max_new_tokens)
            score = accuracy(examples, [reply.text for reply in given])
            forced = sum(
                ANSWERS[reply.choice] == example.answer for reply, example in zip(given, examples, strict=True)
            )
            distinct = len({example.prompt for example in examples})
            cells.append(
                LoraScore(count, probability, questions, distinct, score.num_correct, score.num_unparsed, forced)
            )
    return cells


def replies(model: CachedLM, prompts: Sequence[str], max_new_tokens: int, batch: int = 32) -> list[Reply]:
    """Returns a list with a Reply, generated greedily, to each prompt. Equal prompts run once.

    Twin: `cacheprobe.run` at temperature 0, equal texts in float32.
    """
    runner, _ = choose_path(model)
    token_ids = {prompt: tuple(model.encode(prompt)) for prompt in prompts}
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for ids in dict.fromkeys(token_ids.values()):
        by_length[len(ids)].append(ids)
    reply_to: dict[tuple[int, ...], Reply] = {}
    for group in by_length.values():
        for start in range(0, len(group), batch):
            part = group[start : start + batch]
            reply_to |= dict(zip(part, _reply_to(runner, part, max_new_tokens), strict=True))
    return [reply_to[token_ids[prompt]] for prompt in prompts]


def _reply_to(model: CachedLM, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> list[Reply]:
    """Returns a list with a Reply to each of several different prompts, which must have equal length."""
    answers, choices = list(answer_token_ids(model.tokenizer)), []

    def choose(indices: list[int], logits: Tensor) -> list[int]:
        """Returns a list with the likeliest next token of each text. The first call also fills `choices`: 0 for each
        text for which heads is likelier, 1 for tails."""
        if not choices:
            choices.extend(lowest_argmax(row) for row in logits[:, answers])
        return [lowest_argmax(row) for row in logits]

    length, texts = len(prompts[0]), []
    for ids in continue_texts(model, prompts, length + max_new_tokens, choose):
        new = ids[length:]
        ends = [index for index, token_id in enumerate(new) if token_id in model.stop_token_ids]
        texts.append(model.decode(new[: ends[0]] if ends else new, after=ids[:length]))
    return [Reply(text, choice) for text, choice in zip(texts, choices, strict=True)]


def evaluate_adapter(
    model: str,
    adapter: str,
    people: Sequence[int] = PEOPLE,
    flip_probabilities: Sequence[float] = (0.5,),
    questions: int = 200,
    json_path: Path | None = None,
    progress: bool = True,
) -> dict[str, object]:
    """Evaluates a model without and with a LoRA adapter on coin-flip questions, in float32; prints a table and returns
    the results as a dictionary.

    json_path: file to which the results are also written.
    """
    began = time.monotonic(), time.process_time()
    cells: dict[str, list[LoraScore]] = {"base": [], "adapter": []}
    notes, weights = {}, {}
    bar = Progress(len(cells) * len(flip_probabilities) * len(people), "asking", "cells", enabled=progress)
    for kind, results in cells.items():
        loaded = load_model(model, adapter=adapter if kind == "adapter" else None, progress=progress)
        notes[kind], weights[kind] = loaded.weights_note, loaded.fingerprint()["weights_sha256"]
        for probability in flip_probabilities:
            for count in people:
                with bar:
                    results += evaluate(loaded, [count], [probability], questions=questions)
                    bar.say(f"{kind}: {count} people, p(flip) {probability}: {_text_accuracy(results[-1])}")
                    bar.advance()
    print(table(cells))
    figures = {
        "model": model,
        "adapter": adapter,
        "weights_note": notes,
        "weights_sha256": weights,
        "held_out_names": list(HELD_OUT_NAMES),
        "questions": questions,
        "people": list(people),
        "flip_probabilities": list(flip_probabilities),
        "cells": {kind: [cell.as_dict() for cell in results] for kind, results in cells.items()},
        "seconds": round(time.monotonic() - began[0], 1),
        "cpu_seconds": round(time.process_time() - began[1], 1),
        "threads": torch.get_num_threads(),
    }
    if json_path is not None:
        write_json(json_path, figures)
    return figures


def table(cells: dict[str, list[LoraScore]]) -> str:
    """Returns a Markdown table as text, with one line for each set of questions. For each model, two columns give the
    accuracies of the generated texts and of a forced choice (heads or tails)."""
    kinds = list(cells)
    head = ["people", "p(flip)", "questions (distinct)"]
    head += [f"{kind}, {what}" for kind in kinds for what in ("text", "likelier word")]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for same in zip(*cells.values(), strict=True):
        first = same[0]
        row = [str(first.people), str(first.flip_probability), f"{first.questions} ({first.distinct})"]
        for cell in same:
            row += [_text_accuracy(cell), _format_accuracy(cell.forced_accuracy)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _text_accuracy(cell: LoraScore) -> str:
    """Returns the accuracy of the generated texts as text; adds the number of texts without an answer, if any."""
    return _format_accuracy(cell.accuracy) + (f", {cell.unparsed} unparsed" if cell.unparsed else "")


def _format_accuracy(share: Accuracy) -> str:
    """Returns an accuracy as text: per cent, then the ends of Wilson's 95 % interval."""
    low, high = share.interval
    return f"{100 * share.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f})"
