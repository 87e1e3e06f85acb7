"""Stores an unfinished training in one safetensors file that is replaced whole: adapter, optimizer, step and curve."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.core.values import Json
from cacheprobe.training.lora.train import LoraTrainer

CHECKPOINT = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class LoraState(TypedDict):
    """The metadata of an unfinished training."""

    curve: list[dict[str, Json]]
    """One entry for each checkpoint: step, losses and accuracies."""
    seconds: float
    cpu_seconds: float
    tokens: int
    starts: int
    """How often the training was started or resumed."""
    base: str
    base_weights_sha256: str
    base_weights_note: str


class _Record(TypedDict):
    step: int
    settings: dict[str, Json]
    told: LoraState


def save_checkpoint(trainer: LoraTrainer, folder: Path, state: LoraState) -> None:
    """Writes the whole training state. If the process dies during the write, the earlier file stays.

    state: metadata needed to resume: curve, seconds, base.
    """
    tensors = {f"weight.{name}": weight.detach() for name, weight in trainer.trained.items()}
    for name, weight in trainer.trained.items():
        tensors |= {f"{moment}.{name}": trainer.optimizer.state[weight][moment] for moment in _MOMENTS}
    record = {"step": trainer.step, "settings": trainer.settings.as_dict(), "told": state}
    replace_file(folder / CHECKPOINT, lambda path: save_file(tensors, path, {"training": json.dumps(record)}))


def load_checkpoint(trainer: LoraTrainer, folder: Path) -> LoraState:
    """Loads a saved state into a new trainer with the same settings, and returns the metadata.

    Raises: ValueError for a broken file, or one of other settings.
    """
    path = folder / CHECKPOINT
    record, tensors = _read(path)
    if differing := other_settings(record["settings"], trainer.settings.as_dict()):
        raise ValueError(
            f"{folder} holds a training with other settings ({differing}); give another --out, or remove it"
        )
    with torch.no_grad():
        for name, weight in trainer.trained.items():
            try:
                weight.copy_(tensors[f"weight.{name}"])
                moments = {moment: tensors[f"{moment}.{name}"].clone() for moment in _MOMENTS}
            except KeyError as absent:
                raise ValueError(f"{path} lacks {absent}; remove it and train again") from absent
            trainer.optimizer.state[weight] = {"step": torch.tensor(float(record["step"])), **moments}
    trainer.step = int(record["step"])
    return record["told"]


def other_settings(stored: Mapping[str, object], requested: Mapping[str, object]) -> str:
    """Returns the settings that differ, as text; "" if none do."""
    names = [name for name in {**stored, **requested} if stored.get(name) != requested.get(name)]
    return ", ".join(f"{name}={stored.get(name)!r} there, {requested.get(name)!r} asked" for name in names)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write(temporary path)`, then replaces `path` with that file, flushed to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[_Record, dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as stored:
            record = json.loads(stored.metadata()["training"])
            return record, {key: stored.get_tensor(key) for key in stored.keys()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no checkpoint of a training ({error!s:.120}); remove it and train again"
        ) from error
