"""The short training loop: seeded, resumable, and with a record of its cost.

This file contains no code for models or tasks: the caller supplies a function for the loss of a step.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LoopSettings:
    """Settings of AdamW with a linear warm-up and a cosine decay to zero."""

    steps: int = 400
    batch: int = 64
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    """Maximum norm of a step's gradient."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass(frozen=True)
class Progress:
    """The losses and cost after a step."""

    step: int
    losses: dict[str, float]
    cpu_seconds: float
    """CPU seconds of this process over all steps, including those before an interruption."""


class Loop:
    """Trains a model by a loss. `folder`: directory of a checkpoint, from which a later Loop resumes."""

    def __init__(self, model: nn.Module, settings: LoopSettings, folder: Path | None = None) -> None:
        self.model, self.settings, self.folder = model, settings, folder
        decayed = [w for w in model.parameters() if w.dim() >= 2]
        others = [w for w in model.parameters() if w.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=settings.betas,
        )
        self.step, self.cpu_seconds = 0, 0.0
        self.notes: dict[str, Any] = {}
        """Values that the caller updates from step to step; stored in the checkpoint as JSON."""
        if folder is not None and (folder / "progress.json").exists():
            self._load(folder)

    def run(
        self, losses_of: Callable[[int], dict[str, Tensor]], until: int | None = None, save_every: int = 200
    ) -> Iterator[Progress]:
        """Runs steps up to `until` (default: all). losses_of(step): returns the losses of a step; their sum is
        minimised.

        A step's random draws must depend only on the step's number, so that a resumed run equals an uninterrupted one.
        Raises: FloatingPointError if a loss is not finite; the last checkpoint stays.
        """
        settings, parameters = self.settings, list(self.model.parameters())
        last = settings.steps if until is None else min(until, settings.steps)
        self.model.train()
        while self.step < last:
            began = time.process_time()
            losses = losses_of(self.step)
            total = torch.stack(list(losses.values())).sum()
            if not bool(torch.isfinite(total)):
                raise FloatingPointError(
                    f"step {self.step}: the loss is {float(total.detach())}; lower lr={settings.lr}"
                )
            self.optimizer.zero_grad(set_to_none=True)
            total.backward()
            nn.utils.clip_grad_norm_(parameters, settings.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = settings.lr_at(self.step)
            self.optimizer.step()
            self.step += 1
            self.cpu_seconds += time.process_time() - began
            yield Progress(self.step, {name: float(loss.detach()) for name, loss in losses.items()}, self.cpu_seconds)
            if self.folder is not None and (self.step % save_every == 0 or self.step == last):
                self.save()  # after the caller has made its notes of the step
        self.model.eval()

    # -- checkpoints

    def save(self) -> None:
        """Writes weights, optimizer moments and the step; each file appears whole or not at all. The step is written
        last."""
        from safetensors.torch import save_file

        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{name}": w.detach().contiguous() for name, w in self.model.named_parameters()}
        for name, weight in self.model.named_parameters():
            for key, value in self.optimizer.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value.detach().reshape(-1) if value.dim() == 0 else value.contiguous()
        name = f"step-{self.step}.safetensors"
        save_file(tensors, self.folder / name)
        place = {"step": self.step, "cpu_seconds": self.cpu_seconds, "tensors": name}
        place |= {"notes": self.notes, "settings": self._settings()}
        temporary = self.folder / "progress.json.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(place, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / "progress.json")
        for old in self.folder.glob("step-*.safetensors"):
            if old.name != name:
                old.unlink()

    def _load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        place = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        if place["settings"] != self._settings():
            raise ValueError(
                f"{folder} holds a run under other settings, {place['settings']} against {self._settings()}; give "
                "another folder, or delete this one"
            )
        tensors = load_file(folder / place["tensors"])
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(tensors[f"model.{name}"])
                moments = {k: tensors[f"{k}.{name}"] for k in ("exp_avg", "exp_avg_sq") if f"{k}.{name}" in tensors}
                if moments:
                    self.optimizer.state[weight] = {**moments, "step": tensors[f"step.{name}"].reshape(())}
        self.step, self.cpu_seconds, self.notes = place["step"], place["cpu_seconds"], place.get("notes", {})

    def _settings(self) -> dict[str, object]:
        return {**vars(self.settings), "betas": list(self.settings.betas)}
