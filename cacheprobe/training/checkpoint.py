"""Writes and reads the checkpoint of an unfinished training: one safetensors file of weights and optimizer state."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cacheprobe.core.files import write_whole

CHECKPOINT = "checkpoint.safetensors"


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Writes the checkpoint of a training to one safetensors file in `folder`.

    tensors: weights and optimizer state, by name.  record: JSON values: step, cpu_seconds, notes and settings.
    """
    metadata = {"training": json.dumps(record)}
    write_whole(folder / CHECKPOINT, lambda path: save_file(dict(tensors), path, metadata))


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (record, tensors by name) of the checkpoint in `folder`: the arguments that `write_checkpoint` received.

    Raises: ValueError if the file is missing, or is not a checkpoint.
    """
    path = folder / CHECKPOINT
    try:
        with safe_open(path, "pt") as stored:
            record = json.loads(stored.metadata()["training"])
            if lacking := {"step", "cpu_seconds", "notes", "settings"} - set(record):
                raise ValueError(f"it has no {min(lacking)}")
            return record, {key: stored.get_tensor(key) for key in stored.keys()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no checkpoint of a training ({error!s:.120}); remove it and train again"
        ) from error


def other_settings(stored: Mapping[str, object], requested: Mapping[str, object]) -> str:
    """Returns text that lists every setting with different values in `stored` and `requested`; "" if all are equal. A
    setting that one of them lacks counts as None."""
    names = [name for name in {**stored, **requested} if stored.get(name) != requested.get(name)]
    return ", ".join(f"{name}={stored.get(name)!r} there, {requested.get(name)!r} asked" for name in names)
