"""Reads JSON objects, and files of tensors of other projects: safetensors, npz and torch.save.

This is the one file of the package that calls torch.load, for weights alone: no other code of such a file is run.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from cacheprobe.core.values import Json


def read_json(path: Path) -> dict[str, Json]:
    """Returns the object in a JSON file. Raises: ValueError for another content; OSError."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a .safetensors, .npz or .pt file in float32 on the CPU, by name. No code in it is run.

    Raises: ValueError for a file that is damaged or holds anything but tensors; OSError.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {name: torch.from_numpy(file[name]) for name in file.files}
        elif path.suffix == ".pt":
            found = torch.load(path, map_location="cpu", weights_only=True)
        else:
            found = load_file(path)
        return {name: tensor.float().contiguous() for name, tensor in found.items()}
    except OSError:
        raise
    except Exception as error:  # each library raises errors of its own kinds
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"{path.name} is no whole file of tensors by name ({first_line:.120})") from error
