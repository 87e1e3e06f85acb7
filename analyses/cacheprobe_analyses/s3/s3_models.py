"""The models of `s3_algorithm`: the word problem on S3, with the running state to be said at every action, or thought.

Plain models are trained as in the source: the state after it is the target at every action. The one that thinks is
trained as all here are: on its thoughts and the answer.
Source: Li, Guo and Andreas 2025 (arXiv 2503.02854): the word problem on S3, supervised at every position.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cacheprobe.models.thinking.config import ThinkingConfig
from cacheprobe.models.thinking.lm import ThinkingLM
from cacheprobe.models.thinking.model import ThinkingModel
from cacheprobe.models.thinking.store import CONFIG, load_thinking, save_thinking
from cacheprobe.tasks import Permutations, word_tokenizer
from cacheprobe.tasks.base import Example
from cacheprobe.training.loop import LoopSettings, ModelLoop, StepReport, TrainingProgress
from cacheprobe.training.thinking.losses import IGNORED
from cacheprobe.training.thinking.presets import Preset
from cacheprobe.training.thinking.run import TEST_SEED, train

SEEDS_OF_A_TRAINING = 100_000
"""Each step draws its texts under a seed of its own; those from TEST_SEED on are never trained on."""


@dataclass(frozen=True)
class Subject:
    """A model to train, and the length of the texts that it is trained on."""

    name: str
    operations: int
    """Of a training text: actions after the first one, which is the initial state."""
    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of ThinkingConfig."""
    loop: LoopSettings = field(default_factory=LoopSettings)
    thinks: bool = False

    def __post_init__(self) -> None:
        if self.seed * SEEDS_OF_A_TRAINING + self.loop.steps > TEST_SEED or self.loop.steps > SEEDS_OF_A_TRAINING:
            raise ValueError(f"{self.name}: seed {self.seed} and {self.loop.steps} steps reach the seeds of the tests")

    @property
    def task(self) -> Permutations:
        return group_task(self.operations)


def group_task(operations: int) -> Permutations:
    """The word problem on S3, a token for each action."""
    return Permutations(steps=operations, elements=3, wording="group")


def trained(
    subject: Subject, folder: Path, report: Callable[[str], None] = lambda line: None, progress: bool = False
) -> ThinkingLM:
    """The subject's model, from the folder or trained now; `record` says how."""
    place = folder / subject.name.replace(" ", "-")
    if not (place / CONFIG).exists():
        made = _thinking if subject.thinks else _plain
        with TrainingProgress(subject.loop.steps, 0, progress) as show:

            def told(at: StepReport) -> None:
                show(at.step, subject.name)
                _tell(subject, at, report)

            model, tokenizer, seconds = made(subject, place / "checkpoint", told)
        record = {
            "task": "s3",
            "form": "restate",
            "arm": "thinking" if subject.thinks else "plain",
            "operations": subject.operations,
            "seed": subject.seed,
            "steps": subject.loop.steps,
            "parameters": model.num_parameters,
            "cpu_seconds": round(seconds, 1),
            "command": "python -m cacheprobe_analyses.s3_algorithm",
        }
        save_thinking(place, model, tokenizer, record)
    return load_thinking(place, subject.name)


def _plain(subject: Subject, folder: Path, told: Callable[[StepReport], None]) -> tuple[ThinkingModel, Any, float]:
    tokenizer = word_tokenizer(subject.task.vocabulary())
    config = ThinkingConfig(len(tokenizer), thinks=False, chunk=1, **subject.model)
    loop = ModelLoop(ThinkingModel(config, subject.seed), subject.loop, folder)

    def losses_of(step: int) -> dict[str, Tensor]:
        texts = subject.task.examples(subject.loop.batch, subject.seed * SEEDS_OF_A_TRAINING + step)
        return {"state": running_loss(loop.model, *supervised(texts, tokenizer))}

    for progress in loop.minimise(losses_of):
        told(progress)
    return loop.model.eval(), tokenizer, loop.cpu_seconds


def _thinking(subject: Subject, folder: Path, told: Callable[[StepReport], None]) -> tuple[ThinkingModel, Any, float]:
    preset = Preset(
        group_task,
        operations=tuple(range(1, subject.operations + 1)),
        position_jump=0,
        model=subject.model,
        loop=subject.loop,
    )
    made = train(preset, "thinking", subject.seed, folder, lambda progress, accuracy: told(progress))
    return made.model, made.tokenizer, made.cpu_seconds


def _tell(subject: Subject, progress: StepReport, report: Callable[[str], None]) -> None:
    if progress.step % 100 == 0:
        losses = ", ".join(f"{name} {value:.3f}" for name, value in progress.losses.items())
        report(f"{subject.name}, step {progress.step}: {losses}, {progress.cpu_seconds:.0f} s")


def supervised(examples: list[Example], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Token ids [b, t] of texts of one length with their answers, and labels [b, t].

    At every action the label is the state after it; then the answer, and its end.
    """
    texts = [example.prompt + example.answer for example in examples]
    ids = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
    labels = torch.full_like(ids, IGNORED)
    states = [tokenizer.convert_tokens_to_ids(list(example.states)) for example in examples]
    labels[:, : len(states[0])] = torch.tensor(states)
    labels[:, -2] = ids[:, -1]
    labels[:, -1] = tokenizer.eos_token_id
    return ids, labels


def running_loss(model: ThinkingModel, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over what is labelled, in nats."""
    logits, _ = model(token_ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
