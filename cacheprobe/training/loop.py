"""Runs a training: gradients, clipping, learning rate, optimizer steps, and checkpoints from which the training
resumes.

The caller supplies a function that computes the gradients or the losses of a step.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cacheprobe.core.files import write_whole
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import JsonDict, whole_number
from cacheprobe.training.settings import TrainingSettings

CHECKPOINT = "checkpoint.safetensors"


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], record: JsonDict) -> None:
    """Writes the checkpoint of a training to one safetensors file in `folder`.

    tensors: weights and optimizer state, by name.  record: JSON values: step, cpu_seconds, notes and settings.
    """
    metadata = {"training": json.dumps(record)}
    write_whole(folder / CHECKPOINT, lambda path: save_file(dict(tensors), path, metadata))


def read_checkpoint(folder: Path) -> tuple[JsonDict, dict[str, Tensor]]:
    """Returns (record, tensors by name) of the checkpoint in `folder`: the arguments that `write_checkpoint` received.

    Raises: ValueError if the file is missing, or is not a checkpoint.
    """
    path = folder / CHECKPOINT
    try:
        with safe_open(path, "pt") as stored:
            return json.loads(stored.metadata()["training"]), {key: stored.get_tensor(key) for key in stored.keys()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no checkpoint of a training ({error!s:.120}); remove it and train again"
        ) from error


def other_settings(stored: Mapping[str, object], requested: Mapping[str, object]) -> str:
    """Returns text that lists every setting with different values in `stored` and `requested`; "" if all are equal. A
    setting that one of them lacks counts as None."""
    names = [name for name in {**stored, **requested} if stored.get(name) != requested.get(name)]
    return ", ".join(f"{name}={stored.get(name)!r} there, {requested.get(name)!r} asked" for name in names)


@dataclass(frozen=True)
class LoopSettings(TrainingSettings):
    """Holds the settings of a training with AdamW, a linear warm-up and a cosine decay of the learning rate to zero."""

    steps: int = 400
    batch: int = 64
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup: int = 50
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            whole_number(name, getattr(self, name), at_least=1)
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of step number `step`, from 0: linear for `warmup` steps, then a cosine to zero."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    def as_dict(self) -> JsonDict:
        """Returns the settings as a dictionary of JSON values, by field name."""
        return asdict(self) | {"betas": list(self.betas)}


@dataclass(frozen=True)
class StepReport:
    """Holds the losses of one step by name, the number of steps done, and the CPU seconds so far."""

    step: int
    losses: dict[str, float]
    cpu_seconds: float
    """CPU seconds of all steps so far, including those before an interruption."""


class Loop:
    """Runs the optimizer steps of a training, and resumes from the checkpoint in `folder` if there is one."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        settings: TrainingSettings,
        folder: Path | None = None,
    ) -> None:
        """Starts at step 0, or loads the checkpoint in `folder` if there is one.

        weights: the trained tensors, by name.  folder: None for no checkpoints.
        Raises: ValueError for a checkpoint that cannot be read, lacks a weight, or has other settings.
        """
        self.weights, self.optimizer, self.settings, self.folder = weights, optimizer, settings, folder
        self.step, self.cpu_seconds = 0, 0.0
        self.notes: JsonDict = {}
        """Values that the caller may change after each step; the checkpoint stores these values as JSON."""
        if folder is not None and (folder / CHECKPOINT).exists():
            self._load(folder)

    def run(
        self, gradients_of: Callable[[int], dict[str, float]], until: int | None = None, save_every: int = 200
    ) -> Iterator[StepReport]:
        """Runs the steps that are left, up to step `until` (default: all), and yields a StepReport after each step.

        gradients_of(step): computes the gradients of a step, and returns the losses by name. A step's random draws must
        depend only on the step's number, so that a resumed run equals an uninterrupted one.
        With a folder, a checkpoint is written after step `save_every`, twice `save_every`, ... and after the last step.
        Before each write, the caller receives the step's StepReport, and can update `notes`.
        Raises: FloatingPointError if a loss is not finite; the last checkpoint stays.
        """
        settings, weights = self.settings, list(self.weights.values())
        last = settings.steps if until is None else min(until, settings.steps)
        while self.step < last:
            began = time.process_time()
            self.optimizer.zero_grad(set_to_none=True)
            losses = gradients_of(self.step)
            if not_finite := [name for name, value in losses.items() if not math.isfinite(value)]:
                raise FloatingPointError(
                    f"step {self.step}: {not_finite[0]} is {losses[not_finite[0]]}; lower the learning rate of "
                    f"{settings.learning_rate_at(self.step):.3g}"
                )
            nn.utils.clip_grad_norm_(weights, settings.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(self.step)
            self.optimizer.step()
            self.step += 1
            self.cpu_seconds += time.process_time() - began
            yield StepReport(self.step, losses, self.cpu_seconds)
            if self.folder is not None and (self.step % save_every == 0 or self.step == last):
                self.save()

    def save(self) -> None:
        """Writes a checkpoint to `folder`: weights, optimizer state, step number, CPU seconds, notes and settings."""
        assert self.folder is not None
        tensors = {f"weight.{name}": weight.detach().contiguous() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            for key, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value.detach().contiguous()
        record = {"step": self.step, "cpu_seconds": self.cpu_seconds, "notes": self.notes}
        write_checkpoint(self.folder, tensors, {**record, "settings": self.settings.as_dict()})

    def _load(self, folder: Path) -> None:
        """Restores weights, optimizer state, step number, CPU seconds and notes from the checkpoint in `folder`."""
        record, tensors = read_checkpoint(folder)
        if differing := other_settings(record["settings"], self.settings.as_dict()):
            raise ValueError(
                f"{folder} holds a training with other settings ({differing}); give another folder, or remove this one"
            )
        with torch.no_grad():
            for name, weight in self.weights.items():
                if f"weight.{name}" not in tensors:
                    raise ValueError(f"{folder / CHECKPOINT} lacks the weight {name}; remove it and train again")
                weight.copy_(tensors.pop(f"weight.{name}"))
                keys = [key for key in tensors if key.partition(".")[2] == name]  # of the optimizer, as exp_avg.NAME
                self.optimizer.state[weight] = {key.partition(".")[0]: tensors.pop(key) for key in keys}
        self.step, self.cpu_seconds, self.notes = record["step"], record["cpu_seconds"], record["notes"]


class ModelLoop(Loop):
    """Trains all parameters of a model with AdamW, to minimise the sum of the losses that the caller computes."""

    def __init__(self, model: nn.Module, settings: LoopSettings, folder: Path | None = None) -> None:
        self.model = model
        weights = dict(model.named_parameters())
        groups = [  # weight decay for matrices only, not for biases and norms
            {"params": [w for w in weights.values() if w.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [w for w in weights.values() if w.dim() < 2], "weight_decay": 0.0},
        ]
        super().__init__(weights, torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas), settings, folder)

    def minimise(
        self, losses_of: Callable[[int], dict[str, Tensor]], until: int | None = None, save_every: int = 200
    ) -> Iterator[StepReport]:
        """Runs the steps that are left, up to `until`, to minimise a sum of losses; yields a StepReport after each
        step.

        losses_of(step): returns the losses of a step by name. Checkpoints and errors are as in `run`. The model is in
        training mode until the iterator is exhausted, then in evaluation mode.
        """

        def gradients_of(step: int) -> dict[str, float]:
            """Computes the gradients of the sum of a step's losses; returns the losses as numbers, by name."""
            losses = losses_of(step)
            torch.stack(list(losses.values())).sum().backward()
            return {name: float(loss.detach()) for name, loss in losses.items()}

        self.model.train()
        yield from self.run(gradients_of, until, save_every)
        self.model.eval()


class TrainingProgress(Progress):
    """Shows the progress of a training inside a `with` block: a bar on a terminal, plain lines elsewhere. The caller
    calls the TrainingProgress with (number of steps done, short text) after a step."""

    def __init__(self, total_steps: int, done: int, enabled: bool) -> None:
        super().__init__(total_steps, "training", "steps", done=done, enabled=enabled, says_end=True)

    def __call__(self, done: int, words: str) -> None:
        self.set_done(done, words)


@contextmanager
def one_thread() -> Iterator[None]:
    """Sets torch to one CPU thread inside the `with` block, and restores the old number afterwards. Also a
    decorator."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
