"""Implements `cacheprobe train thinking-states`: trains one arm (variant) of a preset, tests it and saves it."""

from pathlib import Path
from typing import TypedDict

import torch

from cacheprobe.core.registry import same_name
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.store import save_thinking
from cacheprobe.tasks import INSTEAD
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.loop import StepReport
from cacheprobe.training.progress import TrainingProgress
from cacheprobe.training.thinking.presets import PRESETS, preset_of
from cacheprobe.training.thinking.run import CHECK_TEXTS, Trained, train
from cacheprobe.training.threads import one_thread

TESTS = 50
"""Number of test texts for each number of operations."""


class TestScore(TypedDict):
    """Holds the test results of a trained model on texts with one number of operations."""

    operations: int
    texts: int
    accuracy: float
    low: float
    high: float
    """Upper end of the 95 % interval of the accuracy; `low` is the lower end."""
    thoughts_right: float
    """Share of texts in which every thought is right, from 0 to 1."""


class ThinkingRecord(TypedDict):
    """Holds the record that is stored with a trained model: settings, cost and test results."""

    task: str
    preset: str
    arm: str
    seed: int
    form: str
    command: str
    steps: int
    parameters: int
    cpu_seconds: float
    cpu_seconds_to_99: float | None
    cpu_seconds_to_100: float | None
    torch: str
    tests: list[TestScore]


@one_thread()
def train_thinking(
    task: str, preset: str, arm: str, seed: int, out: Path, *, form: str | None = None, progress: bool = True
) -> ThinkingRecord:
    """Trains an arm (one of ARMS, the trained variants) of a preset, tests the model and saves the model in `out`.
    Returns a ThinkingRecord. An interrupted training in `out` is resumed.

    The tests use the model's own thoughts, at the largest trained and at larger numbers of operations.
    task: name of a preset's task, with - or _.  form: how thoughts are written, if not as in the preset.
    """
    task = _task_of_presets(task)
    chosen = preset_of(task, preset, form)
    total = chosen.loop_settings(arm, seed).steps
    with TrainingProgress(total, 0, progress) as show:

        def report(at: StepReport, accuracy: float | None) -> None:
            """Shows the losses of a step on the progress bar; at steps 100, 200, ..., also prints the accuracy on new
            texts."""
            losses = ", ".join(f"{name} {value:.3f}" for name, value in at.losses.items())
            show(at.step, losses)
            if accuracy is not None and at.step % 100 == 0:
                show.say(f"step {at.step}: {losses}; {accuracy:.3f} of fresh texts wholly right")

        trained = train(chosen, arm, seed, out / "checkpoint", report)
    record: ThinkingRecord = {
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
    """Returns the key of PRESETS for a task name with - or _; an unknown name is returned unchanged. Raises: ModelError
    for permutations, whose keys are s3 and s5."""
    instead = [preset for preset, task in INSTEAD.items() if name in (task, task.partition(":")[0])]
    if instead and name not in PRESETS:
        raise ModelError(
            f"no presets for task {name!r}; its trainings are named by the number of elements: "
            f"write {' or '.join(instead)}"
        )
    return same_name(name, PRESETS) or name


def tests(trained: Trained) -> list[TestScore]:
    """Tests a trained model on new texts, with the model's own thoughts. Returns a list of three TestScores: for the
    largest trained number of operations, and for 2 and 4 times that number."""
    longest = trained.preset.operations[-1]
    out: list[TestScore] = []
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


def summary(record: ThinkingRecord, out: Path) -> str:
    """Returns lines of text for a terminal: cost and test results from the record, and the folder of the model."""
    reached = [
        f"{share} % after {seconds} s" if seconds else f"never {share} %"
        for share, seconds in ((99, record["cpu_seconds_to_99"]), (100, record["cpu_seconds_to_100"]))
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
