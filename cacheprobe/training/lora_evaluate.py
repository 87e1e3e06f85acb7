"""How often a model's own text gives the coin's state: by number of people and flip probability, held-out names."""

import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from cacheprobe.models.base import CachedLM
from cacheprobe.models.loaders import load_model
from cacheprobe.models.paths import choose_path
from cacheprobe.ops.sampling import lowest_argmax
from cacheprobe.tasks.base import Accuracy, accuracy
from cacheprobe.tasks.coin_flip import CoinFlip
from cacheprobe.training.lora_checkpoint import replace_file
from cacheprobe.training.lora_settings import HELD_OUT_NAMES

PEOPLE = (1, 2, 3, 4, 5, 6, 8, 10)
FLIP_PROBABILITIES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Cell:
    """One set of balanced questions, and how they were answered."""

    people: int
    flip_probability: float
    questions: int
    distinct: int
    """Different questions among them: with few people, questions recur."""
    correct: int
    unparsed: int
    """Texts without heads or tails: they count as wrong."""

    @property
    def accuracy(self) -> Accuracy:
        return Accuracy(self.questions, self.correct, self.unparsed, chance=0.5)

    def as_dict(self) -> dict[str, float]:
        low, high = self.accuracy.interval
        return asdict(self) | {"accuracy": self.accuracy.accuracy, "low": round(low, 4), "high": round(high, 4)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Cell":
        return cls(**{field.name: stored[field.name] for field in fields(cls)})


def evaluate_adapter(
    model: str,
    adapter: str,
    people: Sequence[int] = PEOPLE,
    flip_probabilities: Sequence[float] = (0.5,),
    questions: int = 200,
    json_path: Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Evaluate a model without and with an adapter in float32, print the table, and return (and write) the figures."""
    began = time.monotonic(), time.process_time()
    kinds: dict[str, list[Cell]] = {"base": [], "adapter": []}
    notes, weights = {}, {}
    for kind in kinds:
        loaded = load_model(model, adapter=adapter if kind == "adapter" else None, progress=progress)
        notes[kind], weights[kind] = loaded.weights_note, loaded.fingerprint()["weights_sha256"]
        for probability in flip_probabilities:
            for count in people:
                cell = evaluate(loaded, [count], [probability], questions=questions)[0]
                kinds[kind].append(cell)
                if progress:
                    print(f"{kind}: {count} people, p(flip) {probability}: {shown(cell)}", file=sys.stderr, flush=True)
    print(table(kinds["base"], kinds["adapter"], ("base", "with the adapter")))
    figures = {
        "model": model,
        "adapter": adapter,
        "weights_note": notes,
        "weights_sha256": weights,
        "held_out_names": list(HELD_OUT_NAMES),
        "questions": questions,
        "people": list(people),
        "flip_probabilities": list(flip_probabilities),
        "cells": {kind: [cell.as_dict() for cell in cells] for kind, cells in kinds.items()},
        "seconds": round(time.monotonic() - began[0], 1),
        "cpu_seconds": round(time.process_time() - began[1], 1),
        "threads": torch.get_num_threads(),
    }
    if json_path is not None:
        replace_file(json_path, lambda path: path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8"))
    return figures


def evaluate(
    model: CachedLM,
    people: Sequence[int] = PEOPLE,
    flip_probabilities: Sequence[float] = (0.5,),
    *,
    questions: int = 200,
    seed: int = 1,
    max_new_tokens: int = 4,
    names: Sequence[str] = HELD_OUT_NAMES,
) -> list[Cell]:
    """Greedy answers to balanced questions without shots; the first "heads" or "tails" in the text counts.

    Raises: ValueError for a task that cannot be, such as more people than names.
    """
    cells = []
    for probability in flip_probabilities:
        for count in people:
            examples = CoinFlip(people=count, flip_probability=probability, names=names).examples(questions, seed)
            texts = greedy_texts(model, [example.prompt for example in examples], max_new_tokens)
            told = accuracy(examples, texts)
            distinct = len({example.prompt for example in examples})
            cells.append(Cell(count, probability, questions, distinct, told.num_correct, told.num_unparsed))
    return cells


def greedy_texts(model: CachedLM, prompts: Sequence[str], max_new_tokens: int, batch: int = 32) -> list[str]:
    """The likeliest continuation of each prompt. Prompts of one length are read together, equal ones once.

    Twin: `cacheprobe.run` at temperature 0, equal texts in float32.
    """
    runner, _ = choose_path(model)
    token_ids = {prompt: tuple(model.encode(prompt)) for prompt in prompts}
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for ids in dict.fromkeys(token_ids.values()):
        by_length[len(ids)].append(ids)
    texts: dict[tuple[int, ...], str] = {}
    for _, group in sorted(by_length.items()):
        for start in range(0, len(group), batch):
            part = group[start : start + batch]
            for ids, new in zip(part, _greedy_tokens(runner, part, max_new_tokens), strict=True):
                ends = [index for index, token_id in enumerate(new) if token_id in model.stop_token_ids]
                texts[ids] = model.decode(new[: ends[0]] if ends else new)
    return [texts[token_ids[prompt]] for prompt in prompts]


def _greedy_tokens(model: CachedLM, prompts: Sequence[tuple[int, ...]], max_new_tokens: int) -> list[list[int]]:
    """New tokens after prompts of one length."""
    length, rows = len(prompts[0]), list(range(len(prompts)))
    cache = model.new_cache(len(prompts), length + max_new_tokens)
    logits = model.forward(torch.tensor(prompts), cache, rows, [0] * len(rows), logit_slots=[length - 1])
    steps = [[lowest_argmax(row) for row in logits[:, 0]]]
    for position in range(length, length + max_new_tokens - 1):
        logits = model.forward(torch.tensor(steps[-1])[:, None], cache, rows, [position] * len(rows))
        steps.append([lowest_argmax(row) for row in logits[:, 0]])
    return [list(new) for new in zip(*steps, strict=True)]


def table(cells: Sequence[Cell], other: Sequence[Cell] = (), heads: tuple[str, str] = ("accuracy", "")) -> str:
    """Markdown: a row for each cell, and the same cell of another model beside it."""
    lines = [f"| people | p(flip) | questions (distinct) | {heads[0]} |" + f" {heads[1]} |" * bool(other)]
    lines.append("|---|---|---|---|" + "---|" * bool(other))
    for index, cell in enumerate(cells):
        row = f"| {cell.people} | {cell.flip_probability} | {cell.questions} ({cell.distinct}) | {shown(cell)} |"
        lines.append(row + (f" {shown(other[index])} |" if other else ""))
    return "\n".join(lines)


def shown(cell: Cell) -> str:
    """Per cent with Wilson's 95 % interval, and the texts that gave no answer."""
    low, high = cell.accuracy.interval
    unparsed = f", {cell.unparsed} unparsed" if cell.unparsed else ""
    return f"{100 * cell.accuracy.accuracy:.1f} % ({100 * low:.1f} to {100 * high:.1f}{unparsed})"
