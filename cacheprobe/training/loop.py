"""The short training loop: seeded, resumable, and honest about what it cost.

Knows nothing about models or tasks: it asks for the loss of a step, and steps.
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
    """AdamW with a linear warm-up and a cosine to zero."""

    steps: int = 400
    batch: int = 64
    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    warmup: int = 50
    clip: float = 1.0
    """Largest norm of a step's gradient."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")

    def lr_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass(frozen=True)
class Progress:
    """What a step came to."""

    step: int
    losses: dict[str, float]
    cpu_seconds: float
    """Of this process, over all steps, those before a break included."""


class Loop:
    """Steps a model down a loss. `folder`: where a checkpoint is kept, from which a later Loop goes on."""

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
        """What the caller counts from step to step, kept in the checkpoint; JSON."""
        if folder is not None and (folder / "progress.json").exists():
            self._load(folder)

    def run(
        self, losses_of: Callable[[int], dict[str, Tensor]], until: int | None = None, save_every: int = 200
    ) -> Iterator[Progress]:
        """Steps up to `until` (default: all of them). losses_of(step): the losses of a step; their sum is stepped down.

        What a step draws must depend on the step's number alone, so that a resumed run is the uninterrupted one.
        Raises: FloatingPointError where a loss is not finite; the last checkpoint stands.
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
        """Weights, moments and place, each whole or as before; the place is written last."""
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

    def _settings(self) -> dict[str, Any]:
        return {**vars(self.settings), "betas": list(self.settings.betas)}
