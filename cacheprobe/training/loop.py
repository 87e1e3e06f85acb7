"""The training loop: gradients, clipping, learning rate, optimizer, and a checkpoint from which it resumes.

This file contains no code for models or tasks: the caller supplies a function that computes a step's gradients, or its
losses.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cacheprobe.core.values import JsonDict
from cacheprobe.training.checkpoint import CHECKPOINT, other_settings, read_checkpoint, write_checkpoint

_OLD_CHECKPOINT = "progress.json"


@runtime_checkable
class Schedule(Protocol):
    """The settings of a training that the loop reads."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        ...

    @property
    def max_grad_norm(self) -> float:
        """Largest norm of a step's gradient; a longer one is scaled down."""
        ...

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        ...

    def as_dict(self) -> JsonDict:
        """Returns the settings as JSON values; a checkpoint of other settings is refused."""
        ...


@dataclass(frozen=True)
class LoopSettings:
    """Settings of AdamW with a linear warm-up and a cosine decay to zero."""

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
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    def as_dict(self) -> JsonDict:
        """Returns the settings as JSON values."""
        return asdict(self) | {"betas": list(self.betas)}


@dataclass(frozen=True)
class Progress:
    """The losses and cost after a step."""

    step: int
    losses: dict[str, float]
    cpu_seconds: float
    """CPU seconds of this process over all steps, including those before an interruption."""


class Loop:
    """Runs the steps of a training, and resumes from the checkpoint in `folder` if there is one."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        settings: Schedule,
        folder: Path | None = None,
    ) -> None:
        """weights: what the optimizer changes, by name.  folder: where checkpoints are written; None for none.

        Raises: ValueError for a checkpoint that is broken, or of other settings.
        """
        self.weights, self.optimizer, self.settings, self.folder = weights, optimizer, settings, folder
        self.step, self.cpu_seconds = 0, 0.0
        self.notes: dict[str, Any] = {}
        """Values that the caller updates from step to step; stored in the checkpoint as JSON."""
        if folder is not None and (folder / CHECKPOINT).exists():
            self._load(folder)
        elif folder is not None and (folder / _OLD_CHECKPOINT).exists():
            raise ValueError(
                f"{folder} holds a training that an earlier version began, and that this one cannot resume; give "
                "another folder, or remove this one"
            )

    def run(
        self, gradients_of: Callable[[int], dict[str, float]], until: int | None = None, save_every: int = 200
    ) -> Iterator[Progress]:
        """Runs steps up to `until` (default: all).

        gradients_of(step): computes the gradients of a step, and returns its losses.

        A step's random draws must depend only on the step's number, so that a resumed run equals an uninterrupted one.
        A checkpoint is written after every `save_every` steps and at the end, when the caller has the step's Progress.
        Raises: FloatingPointError if a loss is not finite; the last checkpoint stays.
        """
        settings, weights = self.settings, list(self.weights.values())
        last = settings.steps if until is None else min(until, settings.steps)
        while self.step < last:
            began = time.process_time()
            self.optimizer.zero_grad(set_to_none=True)
            losses = gradients_of(self.step)
            if wrong := [name for name, value in losses.items() if not math.isfinite(value)]:
                raise FloatingPointError(
                    f"step {self.step}: {wrong[0]} is {losses[wrong[0]]}; lower the learning rate of "
                    f"{settings.learning_rate_at(self.step):.3g}"
                )
            nn.utils.clip_grad_norm_(weights, settings.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(self.step)
            self.optimizer.step()
            self.step += 1
            self.cpu_seconds += time.process_time() - began
            yield Progress(self.step, losses, self.cpu_seconds)
            if self.folder is not None and (self.step % save_every == 0 or self.step == last):
                self.save()

    def save(self) -> None:
        """Writes weights, the optimizer's tensors, step and notes. If the process dies meanwhile, the earlier file
        stays."""
        assert self.folder is not None
        tensors = {f"weight.{name}": weight.detach().contiguous() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            for key, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value.detach().contiguous()
        record = {"step": self.step, "cpu_seconds": self.cpu_seconds, "notes": self.notes}
        write_checkpoint(self.folder, tensors, {**record, "settings": self.settings.as_dict()})

    def _load(self, folder: Path) -> None:
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
                held = [key for key in tensors if key.partition(".")[2] == name]
                self.optimizer.state[weight] = {key.partition(".")[0]: tensors.pop(key) for key in held}
        self.step, self.cpu_seconds, self.notes = record["step"], record["cpu_seconds"], record["notes"]


class ModelLoop(Loop):
    """Trains all parameters of a model with AdamW, by the sum of some losses."""

    def __init__(self, model: nn.Module, settings: LoopSettings, folder: Path | None = None) -> None:
        self.model = model
        weights = dict(model.named_parameters())
        groups = [
            {"params": [w for w in weights.values() if w.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [w for w in weights.values() if w.dim() < 2], "weight_decay": 0.0},
        ]
        super().__init__(weights, torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas), settings, folder)

    def minimise(
        self, losses_of: Callable[[int], dict[str, Tensor]], until: int | None = None, save_every: int = 200
    ) -> Iterator[Progress]:
        """Runs steps as `run` does. losses_of(step): returns the losses of a step; their sum is minimised."""

        def gradients_of(step: int) -> dict[str, float]:
            """Computes the gradients of the sum of the losses."""
            losses = losses_of(step)
            torch.stack(list(losses.values())).sum().backward()
            return {name: float(loss.detach()) for name, loss in losses.items()}

        self.model.train()
        yield from self.run(gradients_of, until, save_every)
        self.model.eval()
