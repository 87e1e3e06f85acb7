"""Makes the tables of what `thinking_states_table` found, beside the published numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheprobe.tasks.base import Accuracy

Cells = Sequence[Mapping[str, Any]]

PAPER = {  # Thinking States (arXiv 2602.08332), Qwen2.5-0.5B trained on at most 10 operations, tested on [10, 100]
    ("coin-flip", "thinking"): "98.37",
    ("coin-flip", "plain"): "54.67",
    ("coin-flip", "chain_of_thought"): "12.35",
    ("variables", "thinking"): "33.76",
    ("variables", "plain"): "2.15",
    ("variables", "chain_of_thought"): "6.78",
}
ARM_NAMES = {
    "thinking": "Thinking States",
    "no_feedback": "same thoughts, no feedback",
    "plain": "no chain of thought",
    "chain_of_thought": "chain of thought",
}
OTHER_ARMS = tuple(arm for arm in ARM_NAMES if arm != "thinking")
MAIN = (  # task, preset, arm
    ("coin-flip", "attention-crowding", "thinking"),
    *(("coin-flip", "tiny", arm) for arm in ARM_NAMES),
    *(("coin-flip", "position-jumps", arm) for arm in OTHER_ARMS),
    ("variables", "attention-crowding", "thinking"),
    *(("variables", "tiny", arm) for arm in ARM_NAMES),
)
LENGTHS = ("10", "20", "[10, 100]", "256", "1000")


@dataclass(frozen=True)
class Result:
    """Cells by line and seed, and how the models were made."""

    cells: dict[str, list[dict[str, Any]]]
    models: dict[str, dict[str, Any]]

    def main_table(self) -> str:
        """Per cent of texts answered rightly by number of operations, and in brackets the worst of all seeds and flip
        probabilities; * where fewer than three seeds are."""
        head = ["task", "arm", "preset", "paper, [10, 100]", *LENGTHS]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for task, preset, arm in MAIN:
            told = [task, ARM_NAMES[arm], f"`{preset}`", PAPER.get((task, arm), "")]
            for length in LENGTHS:
                start = f"{task} {preset} {arm}: {length} operations"
                cells = [c for name, some in self.cells.items() if name.split(", flip")[0] == start for c in some]
                told.append(_percent(cells))
            lines.append(f"| {' | '.join(told)} |")
        return "\n".join(lines)

    def table(self) -> str:
        """Mean and worst over seeds, with the interval of all texts together."""
        lines = [
            "| line | seeds | mean | worst | 95 % | all thoughts right | unparsed |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, cells in self.cells.items():
            texts, right = _sum(cells, "texts"), _sum(cells, "right")
            low, high = Accuracy(texts, right, 0, 0.5).interval
            # an arm that says nothing before the answer has none
            thoughts = "-" if " plain: " in name else f"{100 * _sum(cells, 'thoughts_right') / texts:.1f}"
            lines.append(
                f"| {name} | {len(cells)} | {100 * right / texts:.2f} | {100 * _worst(cells):.2f} | {100 * low:.1f} to "
                f"{100 * high:.1f} | {thoughts} | {_sum(cells, 'unparsed')} |"
            )
        return "\n".join(lines)


def _sum(cells: Cells, key: str) -> int:
    return sum(cell[key] for cell in cells)


def _worst(cells: Cells) -> float:
    return min(cell["right"] / cell["texts"] for cell in cells)


def _percent(cells: Cells) -> str:
    if not cells:
        return ""
    few = "" if len({cell["seed"] for cell in cells}) >= 3 else " *"
    return f"{100 * _sum(cells, 'right') / _sum(cells, 'texts'):.2f} ({100 * _worst(cells):.1f}){few}"
