"""A training on its way, in one safetensors file that is replaced whole: adapter, optimizer, step and curve."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.training.lora.train import LoraTrainer

CHECKPOINT = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_checkpoint(trainer: LoraTrainer, folder: Path, told: dict[str, Any]) -> None:
    """Write the whole state. A process that dies meanwhile leaves the earlier file.

    told: what else is needed to go on, as JSON: curve, seconds, base.
    """
    tensors = {f"weight.{name}": weight.detach() for name, weight in trainer.trained.items()}
    for name, weight in trainer.trained.items():
        tensors |= {f"{moment}.{name}": trainer.optimizer.state[weight][moment] for moment in _MOMENTS}
    record = {"step": trainer.step, "settings": trainer.settings.as_dict(), "told": told}
    replace_file(folder / CHECKPOINT, lambda path: save_file(tensors, path, {"training": json.dumps(record)}))


def load_checkpoint(trainer: LoraTrainer, folder: Path) -> dict[str, Any]:
    """Put a saved state into a fresh trainer of the same settings, and return what was told.

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


def other_settings(stored: dict[str, Any], asked: dict[str, Any]) -> str:
    """The settings that differ, in words."""
    names = [name for name in {**stored, **asked} if stored.get(name) != asked.get(name)]
    return ", ".join(f"{name}={stored.get(name)!r} there, {asked.get(name)!r} asked" for name in names)


def replace_file(path: Path, write: Any) -> None:
    """`write(temporary path)`, then put that file in the place of `path`, on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, "pt") as stored:
            record = json.loads(stored.metadata()["training"])
            return record, {key: stored.get_tensor(key) for key in stored.keys()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no checkpoint of a training ({error!s:.120}); remove it and train again"
        ) from error
