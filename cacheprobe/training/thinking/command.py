"""`cacheprobe train thinking-states`: train one arm, say how far it goes, save it."""

from pathlib import Path
from typing import Any

import torch

from cacheprobe.core.registry import same_name
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.store import save_thinking
from cacheprobe.tasks import INSTEAD
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.progress import TrainingProgress
from cacheprobe.training.thinking.presets import PRESETS, preset_of
from cacheprobe.training.thinking.run import CHECK_TEXTS, Trained, train
from cacheprobe.training.threads import one_thread

TESTS = 50
"""Texts for each line of the summary; the whole table is an analysis of its own."""


@one_thread()
def train_thinking(
    task: str, preset: str, arm: str, seed: int, out: Path, *, form: str | None = None, progress: bool = True
) -> dict[str, Any]:
    """Train, or go on with, one arm; test it by its own thoughts within and beyond its lengths; save it in `out`.

    task: as the presets name it, with - or _.  form: how thoughts are written, where it is not to be the preset's own.
    """
    task = _task_of_presets(task)
    chosen = preset_of(task, preset, form)
    total = chosen.loop_of(arm, seed).steps
    with TrainingProgress(total, 0, progress) as show:

        def report(at: Any, accuracy: float | None) -> None:
            losses = ", ".join(f"{name} {value:.3f}" for name, value in at.losses.items())
            show(at.step, losses)
            if accuracy is not None and at.step % 100 == 0:
                show.say(f"step {at.step}: {losses}; {accuracy:.3f} of fresh texts wholly right")

        trained = train(chosen, arm, seed, out / "checkpoint", report)
    record = {
        "task": task,
        "preset": preset,
        "arm": arm,
        "seed": seed,
        "form": chosen.form,
        "command": f"cacheprobe train thinking-states --task {task} --preset {preset} --arm {arm} --seed {seed}"
        + (f" --form {form}" if form else ""),
        "steps": total,
        "parameters": trained.model.num_parameters,
        "cpu_seconds": round(trained.cpu_seconds, 1),
        "cpu_seconds_to_99": trained.cpu_seconds_to_99 and round(trained.cpu_seconds_to_99, 1),
        "cpu_seconds_to_100": trained.cpu_seconds_to_100 and round(trained.cpu_seconds_to_100, 1),
        "torch": torch.__version__,
        "tests": tests(trained),
    }
    save_thinking(out, trained.model, trained.tokenizer, record)
    return record


def _task_of_presets(name: str) -> str:
    """As PRESETS has it. Raises: ModelError for a task whose presets have names of their own."""
    instead = [preset for preset, task in INSTEAD.items() if name in (task, task.partition(":")[0])]
    if instead and name not in PRESETS:
        raise ModelError(
            f"no presets for task {name!r}; its trainings are named by the number of elements: "
            f"write {' or '.join(instead)}"
        )
    return same_name(name, PRESETS) or name


def tests(trained: Trained) -> list[dict[str, Any]]:
    """Accuracy by its own thoughts and words at the longest trained number of operations, 2 and 4 times that."""
    longest = trained.preset.operations[-1]
    out = []
    for operations in (longest, 2 * longest, 4 * longest):
        verdicts = trained.test((operations,), TESTS)
        right, parsed = sum(verdicts.is_right), sum(verdicts.is_parsable)
        score = Accuracy(TESTS, right, TESTS - parsed, trained.preset.tasks()[0].chance)
        low, high = score.interval
        out.append(
            {
                "operations": operations,
                "texts": TESTS,
                "accuracy": score.accuracy,
                "low": round(low, 3),
                "high": round(high, 3),
                "thoughts_right": sum(verdicts.is_thought_right) / TESTS,
            }
        )
    return out


def summary(record: dict[str, Any], out: Path) -> str:
    """The record as lines for a terminal."""
    reached = [
        f"{share} % after {seconds} s" if (seconds := record[f"cpu_seconds_to_{share}"]) else f"never {share} %"
        for share in (99, 100)
    ]
    lines = [
        f"{record['steps']} steps, {record['parameters']:,} parameters: {record['cpu_seconds']} s of one core; of "
        f"{CHECK_TEXTS} fresh texts, wholly right twice running: {', '.join(reached)}"
    ]
    lines += [
        f"{test['operations']:>5} operations: accuracy {test['accuracy']:.3f} (95 % {test['low']:.3f} to "
        f"{test['high']:.3f}, {test['texts']} texts), all thoughts right in {test['thoughts_right']:.3f}"
        for test in record["tests"]
    ]
    return "\n".join([*lines, f"model: {out}"])
