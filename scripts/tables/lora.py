"""Tables of the stored training and evaluations of the adapter."""

import json
from pathlib import Path
from typing import Any

from cacheprobe.training.lora.evaluate import PEOPLE, LoraScore
from cacheprobe_analyses.records import markdown_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SHIPPED = ROOT / "cacheprobe" / "data" / "adapters" / "coin-flip-smollm2-135m"
COLUMNS = (("lora", "base", 0.5, "base, likelier word"), ("lora", "adapter", 0.5, "adapter"),
           ("lora-flips", "adapter", 0.1, "adapter, p 0.1"), ("lora-flips", "adapter", 0.9, "adapter, p 0.9"),
           ("lora-answer-alone-evaluated", "adapter", 0.5, "trained on the answer alone"))  # fmt: skip


def tables() -> dict[str, str]:
    """Returns by name: the evaluations as one table, and what the two trainings took."""
    return {"lora-evaluations": _evaluations(), "lora-trainings": _trainings()}


def _evaluations() -> str:
    held = {name: _read(RESULTS / f"{name}.json") for name, *_ in COLUMNS}
    commands = "\n".join(
        f"- `{_evaluation_command(told)} --json benchmarks/results/{name}.json`" for name, told in held.items()
    )
    rows = []
    for people in PEOPLE:
        rows.append([people])
        for name, kind, flips, _ in COLUMNS:
            cells = [LoraScore.from_dict(cell) for cell in held[name]["cells"][kind]]
            cell = next(cell for cell in cells if (cell.people, cell.flip_probability) == (people, flips))
            rows[-1].append(_percent(cell, is_text=kind == "adapter"))
    return f"{commands}\n\n{markdown_table(('people', *(head for *_, head in COLUMNS)), rows)}"


def _percent(cell: LoraScore, is_text: bool) -> str:
    counted = cell.accuracy if is_text else cell.forced_accuracy
    low, high = counted.interval
    right = cell.correct if is_text else cell.forced_correct
    return f"{100 * right / cell.questions:.1f} ({100 * low:.0f} to {100 * high:.0f})"


def _trainings() -> str:
    shipped, alone = _read(SHIPPED / "training.json"), _read(RESULTS / "lora-answer-alone.json")
    rows = [
        (
            f"`{told['command']}`",
            told["questions"],
            told["threads"],
            told["cpu_seconds"],
            f"{told['trained_numbers']:,}",
        )
        for told in (shipped, alone)
    ]
    return markdown_table(("command", "questions", "threads", "processor seconds", "trained numbers"), rows)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _evaluation_command(told: dict[str, Any]) -> str:
    words = [f"cacheprobe train lora --evaluate {told['adapter']}"]
    if tuple(told["people"]) != PEOPLE:
        words += [f"--people {count}" for count in told["people"]]
    if told["flip_probabilities"] != [0.5]:
        words += [f"--flip-probability {probability}" for probability in told["flip_probabilities"]]
    return " ".join(words)
