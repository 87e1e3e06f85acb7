"""Evaluates a model without and with a LoRA adapter, and prints both results side by side."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from cacheprobe.core.files import write_json
from cacheprobe.core.terminal import Progress
from cacheprobe.models.loaders import load_model
from cacheprobe.tasks.base import Accuracy
from cacheprobe.tasks.people import HELD_OUT_NAMES
from cacheprobe.training.lora.evaluate import PEOPLE, LoraScore, evaluate


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
