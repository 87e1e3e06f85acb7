"""What does each choice in a Thinking States model do: how thoughts are written, how long a chunk is, where T reads?

    python -m cacheprobe_analyses.thinking_variations [--only TEXT] --json analyses/results/thinking-variations.json

Trainings of the coin-flip model with one thing changed, from one seed, or three where a claim of the paper hangs on it;
each is tested by its own thoughts, at and beyond the trained lengths. What is not in `folder` yet is trained there (one
core); cells are kept as they come.
Source: Thinking States (arXiv 2602.08332), ablations of section 5 and appendix A: chunk size, L_out, state ambiguity.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from cacheprobe.core.files import write_json
from cacheprobe.core.progress import Progress
from cacheprobe.models.thinking.store import CONFIG, save_thinking
from cacheprobe.tasks import TwoCoins
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.loop import TrainingProgress, one_thread
from cacheprobe.training.thinking.presets import Preset, preset_of
from cacheprobe.training.thinking.run import TEST_SEED, Trained, load_trained, train
from cacheprobe_analyses.records import RESULTS

STORED = RESULTS / "thinking-variations.json"
STEPS = 300
FAR = tuple(range(10, 101))
GAPS = ((1, 16), (17, 32), (33, 64), (65, 10_000))
"""Of chunks in a row in which the state stays as it is. Texts of the trained lengths have few runs above 16."""


@dataclass(frozen=True)
class Test:
    """Texts that a model is tested on."""

    name: str
    operations: tuple[int, ...]
    """Drawn uniformly."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the task."""


@dataclass(frozen=True)
class Variation:
    """A model that is trained once, and what it is tested on."""

    name: str
    preset: Preset
    tests: tuple[Test, ...]
    num_seeds: int = 1
    arm: str = "thinking"


@dataclass(frozen=True)
class Config:
    """What is tried, and where the trained models are."""

    variations: tuple[Variation, ...]
    folder: Path = Path("runs/thinking-variations")
    texts: int = 200
    """For each test and seed."""
    results: Path = STORED


@dataclass(frozen=True)
class Result:
    """By variation: for each of its tests a cell of each seed; and how the models were made."""

    cells: dict[str, dict[str, list[dict[str, Any]]]]
    models: dict[str, list[dict[str, Any]]]

    def table(self) -> str:
        """Per cent of texts answered rightly, a line for each coin model, in brackets the worst of several seeds;
        steps, and the mean of the seconds of one core that training took, in all and until 99 % of fresh texts of the
        trained lengths were wholly right, twice running."""
        shared = [test.name for test in coin_tests()]
        head = ["variation", "seeds", *shared, "steps", "seconds", "to 99 %"]
        lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for name, cells in self.cells.items():
            if shared[0] in cells:
                told = [_percent(cells[test]) if test in cells else "" for test in shared]
                told += [_mean([made[key] for made in self.models[name]]) for key in MADE]
                lines.append(f"| {name} | {len(self.models[name])} | {' | '.join(told)} |")
        return "\n".join(lines)

    def gaps(self) -> str:
        """Per cent right of the far texts with few flips, by the longest run of chunks without a change of state."""
        names = [_name(gap) for gap in GAPS]
        lines = [f"| variation | {' | '.join(f'{name} chunks' for name in names)} |", "|---" * (len(GAPS) + 1) + "|"]
        for variation in BY_GAP:
            cells = self.cells.get(variation, {}).get(GAP_TEST, [])
            found = [[sum(cell["by_gap"].get(n, (0, 0))[i] for cell in cells) for i in (0, 1)] for n in names]
            told = [f"{100 * right / count:.1f} of {count}" if count else "" for count, right in found]
            lines += [f"| {variation} | {' | '.join(told)} |"] if cells else []
        return "\n".join(lines)

    def others(self) -> list[str]:
        """The tests that are not those of every coin model, one a line: answers right, and texts of which all thoughts
        are."""
        shared = {test.name for test in coin_tests()}
        return [
            f"{name}, {test}: {_told(found)}"
            for name, cells in self.cells.items()
            for test, found in cells.items()
            if test not in shared
        ]


MADE = ("steps", "cpu_seconds", "cpu_seconds_to_99")
BASE, GAP_TEST = "base", "[10, 100] operations, p 0.1"
BY_GAP = (BASE, "thought: state", "thought: delta")


def coin_tests() -> tuple[Test, ...]:
    """At the longest trained length, at four times that, and far; p: flip probability."""
    lengths = {"10": (10,), "40": (40,), "[10, 100]": FAR}
    return tuple(
        Test(f"{name} operations, p {p}", operations, {"flip_probability": p})
        for name, operations in lengths.items()
        for p in (0.1, 0.9)
    )


def variations(steps: int = STEPS) -> tuple[Variation, ...]:
    """All of them, those that are asked for most first."""
    coin = preset_of("coin-flip", "tiny")
    base = replace(coin, loop=replace(coin.loop, steps=steps), arms={})

    def of(
        name: str, model: dict[str, Any] | None = None, tests: tuple[Test, ...] = (), seeds: int = 1, **changes: Any
    ) -> Variation:
        preset = replace(base, model={**base.model, **(model or {})}, **changes)
        return Variation(name, preset, coin_tests() + tests, seeds)

    still = (Test("10 operations, p 0", (10,), {"flip_probability": 0.0}),)
    still += (Test("[10, 100] operations, p 0", FAR, {"flip_probability": 0.0}),)
    return (
        of(BASE, tests=still, seeds=3),
        of("thought: delta", form="delta", tests=still),
        of("thought: state", form="state", tests=still),
        *(of(f"chunk of {tokens}", dict(chunk=tokens), seeds=3) for tokens in (10, 20, 2)),
        of("no position jumps", position_jump=0),
        two_coins("asked", seeds=3),
        two_coins("asked", orders=(False,), how=", trained with the question last"),
        two_coins("asked", batch=32, how=", in batches of 32"),
        of("one flip probability, 0.5", variants=({"flip_probability": 0.5},)),
        of("learned first state", dict(learned_first_state=True), seeds=3),
        of("query pooling", dict(pooling="query"), seeds=3),
        of("bidirectional prefix", dict(bidirectional_prefix=True), seeds=3),
        of("chunk of 10, L_out 2", dict(chunk=10, l_out=2)),
        of("chunk of 10, L_out 4", dict(chunk=10, l_out=4)),
        two_coins("both"),
        of("no positions", dict(positions="nope")),
        of("window of 16", dict(attention_window=16)),
        of("ALiBi", dict(positions="alibi")),
        *(looped(blocks) for blocks in (4, 1, 3, 2)),
        *(tuned(arm, lr) for lr in (1e-3, 4e-3) for arm in ("plain", "chain_of_thought")),
    )


def looped(blocks: int) -> Variation:
    """A model of S5 whose states pass through so many of its four blocks before the next thought is read. It is trained
    for half the steps that S5 asks for, so that there is room above and below."""
    s5 = preset_of("s5", "tiny")
    preset = replace(s5, model={**s5.model, "l_in": 0, "l_out": blocks}, loop=replace(s5.loop, steps=600))
    return Variation(f"S5, loop of {blocks}", preset, tuple(Test(f"{n} operations", (n,)) for n in (4, 8, 16)), 3)


def tuned(arm: str, lr: float) -> Variation:
    """An arm of the table as it is there, at another learning rate than the 0.002 of all."""
    coin = preset_of("coin-flip", "tiny")
    preset = replace(coin, arms={arm: {**coin.arms[arm], "lr": lr}})
    return Variation(f"{arm.replace('_', ' ')}, learning rate {lr}", preset, coin_tests(), arm=arm)


def two_coins(
    says: str, seeds: int = 1, orders: tuple[bool, ...] = (True, False), batch: int = 128, how: str = ""
) -> Variation:
    """One model that is tested with the question before the story and after it.

    says: every thought names the state of the coin "asked" about, or of "both".
    orders: whether the question comes first, in equal shares of training.
    batch: texts a step; with the coin's own 32, in as many steps, which coin is asked about is not learned.
    how: what a name tells of these.
    """
    coin = preset_of("coin-flip", "attention-crowding")
    preset = replace(
        coin,
        task=lambda people: TwoCoins(people=people, says=says, distinct=people <= 20),
        variants=tuple({"question_first": first} for first in orders),
        form="repeat",
        loop=replace(coin.loop, steps=1000, batch=batch),
        arms={},
    )
    tests = tuple(
        Test(f"{n} operations, question {'first' if first else 'last'}", (n,), {"question_first": first})
        for n in (10, 40)
        for first in (True, False)
    )
    return Variation(f"two coins, thoughts of {says}{how}", preset, tests, seeds)


@one_thread()
def run(config: Config, report: Callable[[str], None] = lambda line: None, progress: bool = False) -> Result:
    """Fill in every cell that is not known yet. Resumable: cells are written as they come."""
    held = json.loads(config.results.read_text(encoding="utf-8")) if config.results.exists() else {}
    cells, models = held.get("cells", {}), held.get("models", {})
    lacking: list[tuple[int, Variation, list[Test]]] = []
    for seed in range(max(variation.num_seeds for variation in config.variations)):
        for variation in config.variations:
            done = cells.get(variation.name, {})
            tests = [test for test in variation.tests if not _is_known(done.get(test.name, []), seed, config.texts)]
            if tests and seed < variation.num_seeds:
                lacking.append((seed, variation, tests))
    bar = Progress(sum(len(tests) for _, _, tests in lacking), "testing", "cells", enabled=progress)
    for seed, variation, tests in lacking:
        trained, record = trained_variation(config.folder, variation, seed, progress)
        models[variation.name] = _with(models.get(variation.name, []), record)
        done = cells.setdefault(variation.name, {})
        for test in tests:
            with bar:  # not around the training, which has a bar of its own
                cell = {"seed": seed, **_test(trained, test, config.texts)}
                done[test.name] = _with(done.get(test.name, []), cell)
                bar.advance(note=variation.name)
            write_json(config.results, {"cells": cells, "models": models})
            report(f"{variation.name}, {test.name}, seed {seed}: {_told([cell])}")
    wanted = [variation.name for variation in config.variations]
    return Result({name: cells[name] for name in wanted}, {name: models[name] for name in wanted})


def trained_variation(
    folder: Path, variation: Variation, seed: int, progress: bool = False
) -> tuple[Trained, dict[str, Any]]:
    """A trained variation and its record, from the folder or trained now."""
    preset, arm = variation.preset, variation.arm
    place = folder / f"{''.join(c if c.isalnum() else '-' for c in variation.name)}-{seed}"
    if not (place / CONFIG).exists():
        steps = preset.loop_settings(arm, seed).steps
        with TrainingProgress(steps, 0, progress) as show:
            made = train(preset, arm, seed, place / "checkpoint", lambda at, _: show(at.step, variation.name))
        record = {
            "form": preset.form,
            "seed": seed,
            "steps": steps,
            "parameters": made.model.num_parameters,
            "cpu_seconds": round(made.cpu_seconds, 1),
            "cpu_seconds_to_99": made.cpu_seconds_to_99 and round(made.cpu_seconds_to_99, 1),
        }
        save_thinking(place, made.model, made.tokenizer, record)
    return load_trained(place, preset, arm, seed)


def _test(trained: Trained, test: Test, texts: int) -> dict[str, Any]:
    verdicts = trained.test(test.operations, texts, TEST_SEED + 1, **test.settings)
    # the same texts under thoughts that name the state in every chunk: how long it stays what it is
    named = replace(trained, preset=replace(trained.preset, form="restate"))
    gaps = [_bucket(item.thoughts) for item in named.items(test.operations, texts, TEST_SEED + 1, **test.settings)]
    right = Counter(gap for gap, is_right in zip(gaps, verdicts.is_right, strict=True) if is_right)
    count = Counter(gaps)
    return {
        **verdicts.counts(),
        "by_gap": {_name(gap): [count[gap], right[gap]] for gap in GAPS if count[gap]},
    }


def _bucket(thoughts: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    longest = max(len(list(run)) for _, run in groupby(thoughts))
    return next(gap for gap in GAPS if gap[0] <= longest <= gap[1])


def _name(gap: tuple[int, int]) -> str:
    return f"{gap[0]} or more" if gap is GAPS[-1] else f"{gap[0]} to {gap[1]}"


def _is_known(cells: Sequence[dict[str, Any]], seed: int, texts: int) -> bool:
    return any(cell["seed"] == seed and cell["texts"] >= texts for cell in cells)


def _with(held: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the other seeds, and the new one."""
    return [*(one for one in held if one["seed"] != new["seed"]), new]


def _mean(found: Sequence[float | None]) -> str:
    """A whole number as one; not reached where a single seed did not."""
    known = [one for one in found if one is not None]
    return f"{sum(known) / len(known):.4g}" if len(known) == len(found) else "not reached"


def _percent(cells: Sequence[dict[str, Any]]) -> str:
    shares = [100 * cell["right"] / cell["texts"] for cell in cells]
    return f"{sum(shares) / len(shares):.1f}" + (f" ({min(shares):.1f})" if len(shares) > 1 else "")


def _told(cells: Sequence[dict[str, Any]]) -> str:
    texts, right = sum(cell["texts"] for cell in cells), sum(cell["right"] for cell in cells)
    low, high = Accuracy(texts, right, 0, 0.5).interval
    each = ", ".join(f"{100 * cell['right'] / cell['texts']:.1f}" for cell in cells)
    seeds = f"; seeds {each} %" if len(cells) > 1 else ""
    thoughts = 100 * sum(cell["thoughts_right"] for cell in cells) / texts
    between = f"95 % {100 * low:.1f} to {100 * high:.1f}"
    return f"{100 * right / texts:.1f} % of {texts} texts ({between}{seeds}); all thoughts right in {thoughts:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Config.folder, help="where trained models are, or go")
    parser.add_argument("--texts", type=int, default=Config.texts, help="for each test and seed")
    parser.add_argument("--only", default="", help="variations whose name holds this text")
    parser.add_argument("--json", type=Path, default=STORED, help="where the cells are kept")
    given = parser.parse_args()
    chosen = tuple(variation for variation in variations() if given.only in variation.name)
    if not chosen:
        parser.error(f"no variation holds {given.only!r}; there are {', '.join(v.name for v in variations())}")
    config = Config(chosen, given.folder, given.texts, results=given.json)
    result = run(config, lambda line: print(line, flush=True), progress=True)
    print("\n".join([result.table(), result.gaps(), *result.others()]))


if __name__ == "__main__":
    main()
