"""How far do Thinking States go beyond the lengths they were trained on, and what do the other arms do?

    python -m cacheprobe_analyses.thinking_states_table [--only TEXT] [--fill]

Prints the stored table with 95 % intervals (Wilson) over the texts of all seeds: of seeds they say nothing, which is
what the worst of them is for. With --fill every cell that is not stored is found first: what is not in `folder` yet is
trained (one core), and tested by its own thoughts and words. Cells are kept as soon as they are known.
Source: Thinking States (arXiv 2602.08332), table of state tracking: train on at most 10 operations, test on [10, 100].
"""

import argparse
import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from cacheprobe.core.files import write_json
from cacheprobe.core.progress import Progress
from cacheprobe.models.thinking.store import CONFIG
from cacheprobe.training.loop import one_thread
from cacheprobe.training.thinking.presets import preset_of
from cacheprobe.training.thinking.run import TEST_SEED, Trained, load_trained, train_thinking
from cacheprobe_analyses.records import RESULTS
from cacheprobe_analyses.thinking.accuracy_tables import Result

STORED, AGAIN = RESULTS / "thinking-states.json", RESULTS / "thinking-states-again.json"
"""The same lines on other texts, drawn after all settings were fixed."""
COIN_FLIPS = (0.0, 0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Row:
    """A line of the table: an arm of a preset, tested at numbers of operations."""

    task: str
    arm: str
    operations: tuple[int, ...]
    """Drawn uniformly."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the task."""
    preset: str = "tiny"
    num_seeds: int = 3

    @property
    def name(self) -> str:
        low, high = self.operations[0], self.operations[-1]
        where = f"{low}" if low == high else f"[{low}, {high}]"
        what = "".join(f", {key} {value}" for key, value in self.settings.items())
        return f"{self.task} {self.preset} {self.arm}: {where} operations{what}"


@dataclass(frozen=True)
class Config:
    """What is tested, and where the trained models are."""

    folder: Path = Path("runs/thinking-states")
    texts: int = 200
    """For each line and seed."""
    rows: tuple[Row, ...] = ()
    results: Path = STORED
    test_seed: int = TEST_SEED + 1
    """Of the texts."""
    trains: bool = True
    """Whether what is not in `folder` is trained; otherwise it is left out."""


_TRAINED = tuple(range(1, 11))


def main_rows() -> tuple[Row, ...]:
    """The lines of the main table."""
    far = tuple(range(10, 101))
    rows = [Row("coin-flip", "thinking", far, {"flip_probability": p}) for p in COIN_FLIPS]
    rows += [Row("coin-flip", "thinking", (256,), {"flip_probability": p}) for p in COIN_FLIPS]
    rows += [Row("coin-flip", "thinking", (1000,), {"flip_probability": p}) for p in COIN_FLIPS]
    rows += [
        Row("coin-flip", "thinking", operations, {"flip_probability": p}, preset="attention-crowding")
        for operations in ((1000,), (256,), far)
        for p in COIN_FLIPS
    ]
    rows += [Row("coin-flip", "thinking", operations, preset="small") for operations in (_TRAINED, far)]
    rows += [Row("coin-flip", "thinking", _TRAINED)]
    rows += [
        Row("coin-flip", "thinking", (n,), preset=preset) for preset in ("attention-crowding", "tiny") for n in (10, 20)
    ]
    for preset in ("no-position-jumps", "paper"):
        rows += [Row("coin-flip", "thinking", operations, preset=preset) for operations in ((10,), (20,), far, (256,))]
    for arm, preset in product(("no_feedback", "plain", "chain_of_thought"), ("tiny", "position-jumps")):
        rows += [Row("coin-flip", arm, operations, preset=preset) for operations in ((10,), (20,), far)]
        rows += [  # 0.5 is above
            Row("coin-flip", arm, far, {"flip_probability": p}, preset=preset) for p in COIN_FLIPS if p != 0.5
        ]
    bare = dict(arm="chain_of_thought", preset="bare-chain")
    rows += [Row("coin-flip", operations=operations, **bare) for operations in ((10,), (20,), far)]
    rows += [Row("s3", "thinking", (operations,)) for operations in (4, 16, 128)]
    rows += [Row("s3", "thinking", (operations,), preset="full", num_seeds=2) for operations in (4, 16, 128)]
    rows += [Row("s3", "thinking", (operations,), preset="attention-crowding") for operations in (4, 16, 128)]
    rows += [Row("s5", "thinking", (operations,)) for operations in (4, 16, 64, 128)]
    rows += [Row("variables", "thinking", operations) for operations in ((10,), (20,), far)]
    rows += [
        Row("variables", "thinking", operations, preset="attention-crowding") for operations in ((10,), (20,), far)
    ]
    for arm in ("no_feedback", "plain", "chain_of_thought"):
        rows += [Row("variables", arm, operations) for operations in ((10,), (20,), far)]
    return tuple(rows)


@one_thread()
def run(config: Config, progress: bool = False) -> Result:
    """Fill in every cell that is not known yet. Resumable: cells are written as they come."""
    jobs = lacking(config)
    bar = Progress(len(jobs), "testing", "cells", enabled=progress)
    for number, (row, seed) in enumerate(jobs, 1):
        if _is_known(_read(config.results)["cells"], row, seed, config.texts):
            continue  # another process was quicker
        if not config.trains and not (_place(config.folder, row.task, row.preset, row.arm, seed) / CONFIG).exists():
            continue
        trained, record = trained_arm(config.folder, row.task, row.preset, row.arm, seed)
        with bar:  # not around the training, which has a bar of its own
            bar.set_done(number - 1, f"{row.name}, seed {seed}")
            verdicts = trained.test(row.operations, config.texts, config.test_seed, **row.settings)
            bar.set_done(number)
        cell = {"seed": seed, **verdicts.counts()}
        _keep(config.results, row.name, cell, f"{row.task} {row.preset} {row.arm} seed {seed}", record)
        print(f"{row.name}, seed {seed}: {cell['right']} of {config.texts}", flush=True)
    return stored(config)


def stored(config: Config) -> Result:
    """What is known of the config's lines, in their order."""
    held = _read(config.results)
    return Result(
        {row.name: held["cells"][row.name] for row in config.rows if row.name in held["cells"]}, held["models"]
    )


def lacking(config: Config) -> list[tuple[Row, int]]:
    """Lines and seeds of which nothing is known yet."""
    held = _read(config.results)["cells"]
    return [(row, seed) for row, seed in _jobs(config) if not _is_known(held, row, seed, config.texts)]


def _is_known(cells: dict[str, list[dict[str, Any]]], row: Row, seed: int, texts: int) -> bool:
    return any(cell["seed"] == seed and cell["texts"] >= texts for cell in cells.get(row.name, []))


def trained_arm(folder: Path, task: str, preset: str, arm: str, seed: int) -> tuple[Trained, dict[str, Any]]:
    """A trained arm and its record, from the folder or trained now."""
    place = _place(folder, task, preset, arm, seed)
    if not (place / CONFIG).exists():
        train_thinking(task, preset, arm, seed, place)
    return load_trained(place, preset_of(task, preset), arm, seed)


def _place(folder: Path, task: str, preset: str, arm: str, seed: int) -> Path:
    return folder / f"{task}-{preset}-{arm}-{seed}"


def _jobs(config: Config) -> Iterator[tuple[Row, int]]:
    """Seed by seed, so that a broken-off run has every line of the first."""
    for seed in range(max(row.num_seeds for row in config.rows)):
        yield from ((row, seed) for row in config.rows if seed < row.num_seeds)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": {}, "models": {}}


def _keep(path: Path, name: str, cell: dict[str, Any], model: str, record: dict[str, Any]) -> None:
    """Add one cell; several processes may fill one table, each with lines of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = _read(path)
        held["cells"][name] = [c for c in held["cells"].get(name, []) if c["seed"] != cell["seed"]] + [cell]
        made = ("command", "parameters", "steps", "cpu_seconds", "cpu_seconds_to_99")
        held["models"][model] = {key: record[key] for key in made}
        write_json(path, held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Config.folder, help="where trained models are, or go")
    parser.add_argument("--texts", type=int, default=Config.texts, help="for each line and seed")
    parser.add_argument("--only", default="", help="lines whose name holds this text")
    parser.add_argument("--fill", action="store_true", help="train and test what is not stored: hours of one core")
    parser.add_argument("--again", action="store_true", help="other texts; --fill tests what is trained already")
    given = parser.parse_args()
    rows = tuple(row for row in main_rows() if given.only in row.name)
    if not rows:
        parser.error(f"no line holds {given.only!r}")
    again = dict(results=AGAIN, test_seed=TEST_SEED + 2, trains=False) if given.again else {}
    config = Config(given.folder, given.texts, rows, **again)
    result = run(config, progress=True) if given.fill else stored(config)
    if not result.cells:
        parser.error(f"{config.results} holds none of these lines; --fill finds them")
    print(result.table() if given.only else f"{result.main_table()}\n\n{result.table()}")
    if missing := lacking(config):
        row, seed = missing[0]
        print(f"{len(missing)} cells are not known, {row.name}, seed {seed}, first; --fill finds them")


if __name__ == "__main__":
    main()
