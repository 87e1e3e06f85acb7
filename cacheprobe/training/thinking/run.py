"""Trains one arm (variant) of a Thinking States preset from a seed, tests it, saves it, and measures the training's
cost."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.registry import same_name
from cacheprobe.core.values import JsonDict, whole_number
from cacheprobe.models.base import ModelError
from cacheprobe.models.thinking.config import ThinkingConfig, TrainingRecord
from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.models.thinking.store import load_thinking, read_config, save_thinking
from cacheprobe.tasks import Annotated, annotate_all, mixed, word_tokenizer
from cacheprobe.tasks.base import Accuracy
from cacheprobe.training.loop import ModelLoop, StepReport, TrainingProgress, one_thread
from cacheprobe.training.thinking.evaluate import Judgements, evaluate, follows_gold
from cacheprobe.training.thinking.losses import attention_crowding, collate, losses, skipping_positions
from cacheprobe.training.thinking.presets import PRESETS, Preset, changed, preset_of

TEST_SEED = 1_000_000
"""First seed of test questions; training questions have lower seeds. The texts that measure the accuracy during a
training have the seeds from TEST_SEED + seed on."""
VARIANT_SEEDS = 1_000
"""Distance between the seeds of a preset's variants."""
CHECK_EVERY, CHECK_TEXTS = 25, 128
"""Steps between two checks of the accuracy in training, and number of texts in a check."""


@dataclass
class Trained:
    """Holds a trained model of one arm, with its tokenizer and the cost of the training."""

    model: ThinkingModel
    tokenizer: LiveTokenizer
    preset: Preset
    arm: str
    seed: int
    cpu_seconds: float
    """CPU seconds of the training steps. Making texts and measuring the accuracy are not counted."""
    cpu_seconds_to_99: float | None
    """CPU seconds until >= 99 % of new texts of trained lengths were wholly right, twice in a row; None if never."""
    cpu_seconds_to_100: float | None = None
    """CPU seconds until 100 % of such new texts were entirely right, twice in a row; None if never."""

    def items(self, operations: tuple[int, ...], n: int, seed: int = TEST_SEED, **task: object) -> list[Annotated]:
        """Returns a list of `n` new texts as Annotated, each with a number of operations drawn uniformly from
        `operations`.

        task: other values for settings of the preset's task.
        """
        changed_task = changed(self.preset.task(operations[-1]), task)
        texts = mixed(changed_task, operations, n=n, seed=seed)
        config = self.model.config
        chain, longest = self.preset.chain_form(self.arm), config.max_thought
        return annotate_all(texts, self.tokenizer, config.chunk, self.preset.form, max_thought=longest, chain=chain)

    def test(self, operations: tuple[int, ...], n: int, seed: int = TEST_SEED, **task: object) -> Judgements:
        """Runs the model on the texts of `items`, with the model's own thoughts and tokens; returns Judgements (three
        True or False values for each text)."""
        return evaluate(self.model, self.items(operations, n, seed, **task), self.arm)


def load_trained(folder: Path, preset: Preset, arm: str, seed: int) -> tuple[Trained, TrainingRecord]:
    """Returns (Trained, training record) of a model that `save_thinking` wrote to `folder`.

    Raises: ModelError if the folder holds no such model, or a model that was saved without its training cost.
    """
    record, lm = read_config(folder)["record"], load_thinking(folder)
    if lacking := [name for name in ("cpu_seconds", "cpu_seconds_to_99") if name not in record]:
        raise ModelError(f"the record of {folder} has no {lacking[0]!r}; delete the folder, and it is trained again")
    assert "cpu_seconds" in record and "cpu_seconds_to_99" in record
    seconds = record["cpu_seconds"], record["cpu_seconds_to_99"], record.get("cpu_seconds_to_100")
    return Trained(lm.model, lm.tokenizer, preset, arm, seed, *seconds), record


def train(
    preset: Preset,
    arm: str = "thinking",
    seed: int = 0,
    folder: Path | None = None,
    report: Callable[[StepReport, float | None], None] = lambda progress, accuracy: None,
    seconds: float = math.inf,
) -> Trained:
    """Trains one arm of a preset; returns a Trained: the model, its tokenizer and the cost of the training.

    arm: one of ARMS, the variants of the training, such as "plain".  folder: for checkpoints; the same call resumes
    from them. None: no checkpoints.
    report: called after every step with the StepReport and the accuracy on new texts of the trained lengths, None if it
    was not measured.
    seconds: CPU seconds after which no further step begins; the learning-rate schedule stays that of all steps.
    Raises: ValueError if the folder holds a training of another arm, or with other settings or texts, and for a seed
    that would reach the texts of the tests; FloatingPointError for a loss that is not finite.
    """
    _require_training_seed(seed, len(preset.variants))
    tokenizer = word_tokenizer(preset.vocabulary())
    model = ThinkingModel(preset.config(arm, len(tokenizer)), seed)
    settings, jump = preset.loop_settings(arm, seed), preset.max_position_jump(arm)
    chunk = model.config.chunk
    pool = _annotated(preset, arm, tokenizer, model.config, preset.pool, seed)
    fresh = _annotated(preset, arm, tokenizer, model.config, CHECK_TEXTS, TEST_SEED + seed)
    loop = ModelLoop(model, settings, folder)
    is_crowded = preset.attention_crowding and jump > 0
    identity = {"arm": arm, "form": preset.form, "position_jump": jump, "attention_crowding": is_crowded}
    identity |= {"chain": preset.chain_form(arm), "config": model.config.to_json()}
    stored = loop.notes.setdefault("of", identity)  # that of the checkpoint, if the training resumes
    if other := [name for name, value in identity.items() if stored[name] != value]:
        raise ValueError(
            f"{folder} holds a training with {other[0]} {stored[other[0]]!r}, not {identity[other[0]]!r}; give another "
            "folder, or delete this one"
        )

    def losses_of(step: int) -> dict[str, torch.Tensor]:
        """Returns the losses of training step `step` by name, on a random batch of the training texts."""
        draw = Random(f"{seed}/{step}")
        chosen = [pool[int(draw.random() * len(pool))] for _ in range(settings.batch)]
        batch = collate(chosen, arm, model.config.pad_id)
        if not jump:
            return losses(model, batch)
        positions = skipping_positions(batch, chunk, jump, step)
        return losses(model, batch, positions, attention_crowding(positions, chunk) if is_crowded else None)

    for progress in loop.minimise(losses_of):
        accuracy = None
        if progress.step % CHECK_EVERY == 0 or progress.step == settings.steps:
            with torch.inference_mode():
                accuracy = sum(follows_gold(model, fresh, arm)) / len(fresh)
            for good, least, to in (("good", 0.99, "to_99"), ("perfect", 1.0, "to_100")):
                loop.notes[good] = loop.notes.get(good, 0) + 1 if accuracy >= least else 0
                if loop.notes[good] == 2:
                    loop.notes.setdefault(to, progress.cpu_seconds)
        report(progress, accuracy)
        if progress.cpu_seconds >= seconds:
            break
    to_99, to_100 = loop.notes.get("to_99"), loop.notes.get("to_100")
    return Trained(model.eval(), tokenizer, preset, arm, seed, loop.cpu_seconds, to_99, to_100)


def _require_training_seed(seed: int, num_variants: int) -> None:
    """Checks a training seed. Raises: ValueError if it is invalid, or if a variant's texts could equal test texts."""
    highest = TEST_SEED - 1 - VARIANT_SEEDS * (num_variants - 1)
    if whole_number("seed", seed, at_least=0) > highest:
        raise ValueError(f"seed={seed} is none to train with: larger seeds are those of tests; give 0 to {highest}")


def _annotated(
    preset: Preset, arm: str, tokenizer: LiveTokenizer, config: ThinkingConfig, n: int, seed: int
) -> list[Annotated]:
    """Returns a list of at least `n` training texts as `Annotated` (token ids in chunks, with gold thoughts), equally
    many from each variant of the preset's task. Each text gets a random number of pads, 0 to chunk - 1, before its
    closing words."""
    share = -(-n // len(preset.variants))
    texts = [
        text
        for i, task in enumerate(preset.tasks())
        for text in mixed(task, preset.operations, n=share, seed=seed + VARIANT_SEEDS * i)
    ]
    draw = Random(f"phases/{seed}")
    pads_before_closing = [int(draw.random() * config.chunk) for _ in texts]
    chain = preset.chain_form(arm)
    settings = config.chunk, preset.form, pads_before_closing, config.max_thought, chain
    return annotate_all(texts, tokenizer, *settings)


TESTS = 50
"""Number of test texts for each number of operations."""


@one_thread()
def train_thinking(
    task: str, preset: str, arm: str, seed: int, out: Path, *, form: str | None = None, progress: bool = True
) -> JsonDict:
    """Trains an arm (one of ARMS, the trained variants) of a preset, tests the model and saves the model in `out`.
    Returns the record that is stored with the model: settings, cost and test results. An interrupted training in `out`
    is resumed.

    The tests use the model's own thoughts, at the largest trained and at larger numbers of operations.
    task: name of a preset's task, with - or _.  form: how thoughts are written, if not as in the preset.
    """
    task = same_name(task, PRESETS) or task
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
    record: JsonDict = {
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


def tests(trained: Trained) -> list[JsonDict]:
    """Tests a trained model on new texts, with the model's own thoughts. Returns three results: for the
    largest trained number of operations, and for 2 and 4 times that number."""
    longest = trained.preset.operations[-1]
    out: list[JsonDict] = []
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


def summary(record: JsonDict, out: Path) -> str:
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
