"""Reads tensors from files that torch.save wrote, as weights alone: no other code of the file is run.

This is the one file of the package that calls torch.load.
"""

import pickletools
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from cacheprobe.lenses.dictionaries.array_files import first_bytes

_LARGEST_INDEX = 2**20
"""Bytes of the pickled index, which names the tensors of a file and holds none of their numbers."""
_NAMED = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter"}


def read_torch_weights(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file that torch.save wrote of a dictionary of tensors, by name, on the CPU.

    A file that is compressed, or whose index is large, is refused before its numbers are read, so a small file cannot
    take much memory.
    Raises: ValueError for a file that is no such file, is truncated, or names anything but tensors; OSError.
    """
    first_bytes(path, 1)
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            index = [one for one in records if one.filename.endswith("/data.pkl")]
            if len(index) != 1 or index[0].file_size > _LARGEST_INDEX:
                raise ValueError("it has no index of tensors, or an index that is too large")
            if any(one.compress_type != zipfile.ZIP_STORED for one in records):
                raise ValueError("it is compressed, which torch.save does not do")
            _require_tensors_alone(archive.read(index[0]))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except ValueError:
        raise
    except Exception as error:  # torch.load and zipfile raise errors of many kinds
        raise ValueError(f"{type(error).__name__}: {error!s:.120}") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise ValueError("it should be a dictionary of tensors")
    sizes = {one.file_size for one in records}
    for name, tensor in content.items():
        stored = tensor.untyped_storage().nbytes()
        # torch.load believes the index, which may name more numbers than the record holds
        if stored not in sizes or tensor.numel() * tensor.element_size() > stored:
            raise ValueError(f"{name:.60} names more numbers than the file holds")
    return content


def _require_tensors_alone(index: bytes) -> None:
    """Raises: ValueError if a pickled index names anything but tensors and their storages. `weights_only` allows more:
    a bytearray of any length, for example."""
    for code, argument, _ in pickletools.genops(index):
        is_storage = isinstance(argument, str) and argument.startswith("torch ") and argument.endswith("Storage")
        if code.name == "GLOBAL" and not is_storage and argument not in _NAMED:
            raise ValueError(f"it names {argument!s:.60}, which is no tensor")
        if code.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            raise ValueError("its index is not as torch.save writes it")
