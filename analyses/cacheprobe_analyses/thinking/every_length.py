"""Is every single number of operations followed as well as their mean, and how sure is that mean?

    python -m cacheprobe_analyses.every_length

The coin-flip models of `thinking_states_table` by their own thoughts, on so many texts of each number of operations,
flip probability and seed: there a line of [10, 100] operations has two of each, and its mean an interval too wide to
tell 99.9 % from 99.5. Cells are kept as they come; models that are not in `folder` yet are trained (one core).
Source: Thinking States (arXiv 2602.08332), table of state tracking: trained on at most 10, tested on [10, 100].
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cacheprobe.core.files import write_json
from cacheprobe.core.progress import Progress
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.loop import one_thread
from cacheprobe_analyses.records import RESULTS
from cacheprobe_analyses.thinking.thinking_states_table import COIN_FLIPS, trained_arm
from cacheprobe_analyses.thinking.thinking_states_table import Config as Table

KEPT = RESULTS / "every-length.json"
TEXTS_SEED = 4_000_000
"""No other analysis tests on these."""


@dataclass(frozen=True)
class Config:
    """What is tested, and where the trained models are."""

    presets: tuple[str, ...] = ("attention-crowding",)
    """Of coin-flip."""
    seeds: tuple[int, ...] = (0, 1, 2)
    operations: tuple[int, ...] = tuple(range(10, 101))
    flip_probabilities: tuple[float, ...] = COIN_FLIPS
    texts: int = 200
    """Of each number of operations, flip probability and seed."""
    folder: Path = Table.folder
    results: Path = KEPT


@dataclass(frozen=True)
class Cell:
    """A seed's texts of one flip probability."""

    preset: str
    flip_probability: float
    seed: int
    operations: tuple[int, int]
    """Fewest and most."""
    texts: int
    """Of each number of operations."""
    wrong: dict[str, int]
    """By number of operations, where any were; a text without an answer is wrong."""


@dataclass(frozen=True)
class Result:
    """Cells as far as they are known."""

    cells: list[Cell]

    @classmethod
    def of(cls, held: list[dict]) -> "Result":
        """A stored result."""
        return cls([Cell(**{**cell, "operations": tuple(cell["operations"])}) for cell in held])

    def table(self) -> str:
        """In Markdown, all seeds of a preset and flip probability in a line."""
        head = ["preset", "flip probability", "operations", "seeds", "texts", "wrong", "right", "95 %", "worst seed"]
        head += ["worst length of a seed"]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        groups: dict[tuple, list[Cell]] = defaultdict(list)
        for cell in self.cells:
            groups[cell.preset, cell.flip_probability, cell.operations].append(cell)
        for (preset, flips, (fewest, most)), cells in groups.items():
            each = [cell.texts * (most - fewest + 1) for cell in cells]
            wrong = [sum(cell.wrong.values()) for cell in cells]
            low, high = Accuracy(sum(each), sum(each) - sum(wrong), 0, 0.5).interval
            worst_seed = min(1 - w / n for w, n in zip(wrong, each, strict=True))
            worst_length = min(1 - max(cell.wrong.values(), default=0) / cell.texts for cell in cells)
            told = [preset, f"{flips}", f"[{fewest}, {most}]", f"{len(cells)}", f"{sum(each):,}", f"{sum(wrong)}"]
            told += [f"{100 * (1 - sum(wrong) / sum(each)):.3f}", f"{100 * low:.3f} to {100 * high:.3f}"]
            told += [f"{100 * worst_seed:.3f}", f"{100 * worst_length:.1f}"]
            lines.append(f"| {' | '.join(told)} |")
        return "\n".join(lines)


@one_thread()
def run(config: Config, progress: bool = False) -> Result:
    """Fill in every cell that is not known yet."""
    jobs = [(p, s, f) for p in config.presets for s in config.seeds for f in config.flip_probabilities]
    span = config.operations[0], config.operations[-1]
    if config.operations != tuple(range(span[0], span[1] + 1)):
        raise ValueError(f"operations={config.operations} must be every number from the first to the last")
    bar = Progress(len(jobs) * len(config.operations), "testing", "lengths", enabled=progress)
    for number, (preset, seed, flips) in enumerate(jobs):
        found = _read(config.results)
        if any((c.preset, c.seed, c.flip_probability, c.operations) == (preset, seed, flips, span) for c in found):
            continue
        trained, _ = trained_arm(config.folder, "coin-flip", preset, "thinking", seed)
        wrong: dict[str, int] = {}
        with bar:  # not around the training, which has a bar of its own
            for done, operations in enumerate(config.operations):
                verdicts = trained.test((operations,), config.texts, TEXTS_SEED, flip_probability=flips)
                if missed := config.texts - sum(verdicts.is_right):
                    wrong[str(operations)] = missed
                bar.set_done(number * len(config.operations) + done, f"{preset}, seed {seed}, p {flips}")
        cells = [*_read(config.results), Cell(preset, flips, seed, span, config.texts, wrong)]
        write_json(config.results, [vars(cell) for cell in cells])
    return stored(config.results)


def stored(path: Path = KEPT) -> Result:
    """What is known, in the order of presets and flip probabilities."""
    return Result(sorted(_read(path), key=lambda cell: (cell.preset, cell.flip_probability, cell.seed)))


def _read(path: Path) -> list[Cell]:
    return Result.of(json.loads(path.read_text(encoding="utf-8"))).cells if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Config.folder, help="where trained models are, or go")
    parser.add_argument("--texts", type=int, default=Config.texts, help="of each length, flip probability and seed")
    parser.add_argument("--json", type=Path, default=Config.results, help="where cells are kept as they come")
    given = parser.parse_args()
    print(run(Config(texts=given.texts, folder=given.folder, results=given.json), progress=True).table())


if __name__ == "__main__":
    main()
