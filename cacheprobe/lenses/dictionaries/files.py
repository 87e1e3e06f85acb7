"""Reads JSON, safetensors, npz and torch files of other projects: checks sizes, names and shapes before it reads
numbers.

This is the one file of the package that calls torch.load, for weights alone: no other code of such a file is run.
"""

import json
import math
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheprobe.core.values import Json

_LARGEST_TEXT = 2**20
"""Bytes of a config, or of the header of a file of tensors."""
_MOST_TENSORS = 64
_MOST_INFLATED = 4
"""An npz file may be compressed; weights do not compress to less than a quarter of their size."""
DTYPES = ("F64", "F32", "F16", "BF16")
"""safetensors' names of the dtypes that weights may have."""


def read_json(path: Path) -> dict[str, Json]:
    """Returns the object in a JSON file of at most 1 MiB. Raises: ValueError for another file or content; OSError."""
    text = first_bytes(path, _LARGEST_TEXT + 1)
    if len(text) > _LARGEST_TEXT:
        raise ValueError("it is larger than 1 MiB")
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def safetensors_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor in a safetensors file, by name. Reads the header alone.

    Raises: ValueError for a broken or truncated file, a header above 1 MiB, or a dtype that is no float; OSError.
    """
    start = first_bytes(path, 8)
    if len(start) < 8 or struct.unpack("<Q", start)[0] > _LARGEST_TEXT:
        raise ValueError("its header is truncated, or larger than 1 MiB")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())[: _MOST_TENSORS + 1]}
            found = {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OverflowError) as error:
        raise ValueError(f"{error!s:.120}") from error
    if len(found) > _MOST_TENSORS:
        raise ValueError(f"it has more than {_MOST_TENSORS} tensors")
    for name, (_, dtype) in found.items():
        if dtype not in DTYPES:
            raise ValueError(f"{name:.60} is of dtype {dtype}, weights are {', '.join(DTYPES)}")
    return {name: shape for name, (shape, _) in found.items()}


def read_safetensors(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Returns the wanted tensors of a safetensors file in float32. Raises: ValueError for other shapes, as
    `require_shapes`, and as `safetensors_shapes`; OSError."""
    require_shapes(safetensors_shapes(path), wanted)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).float() for name in wanted}


def npz_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array in an npz file, by name. Reads the headers alone.

    Raises: ValueError for a broken or truncated file, one that inflates to more than four times its size, an array that
    is no float, or whose size is not that of its shape; OSError.
    """
    first_bytes(path, 1)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            inflated = sum(one.file_size for one in members)
            if len(members) > _MOST_TENSORS or inflated > _MOST_INFLATED * path.stat().st_size + _LARGEST_TEXT:
                raise ValueError(f"it holds {len(members)} arrays of {inflated} bytes, more than weights can take")
            return {one.filename.removesuffix(".npy"): _npy_shape(archive, one) for one in members}
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error!s:.120}") from error


def _npy_shape(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[int, ...]:
    """Returns the shape of one array of an npz file. Raises: ValueError if the array is no float array, or its size is
    not that of its shape."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file, max_header_size=10_000)
        if dtype.kind != "f" or math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise ValueError(f"{member.filename:.60} is no array of floats of the shape that it names")
    return tuple(shape)


def read_npz(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Returns the wanted arrays of an npz file as float32 tensors. Raises: as `require_shapes` and `npz_shapes`."""
    require_shapes(npz_shapes(path), wanted)
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(np.array(file[name], dtype=np.float32)) for name in wanted}
    except (zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{type(error).__name__}: {error!s:.120}") from error


def require_shapes(shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises: ValueError if a wanted tensor is missing or has another shape, or if there is a tensor more."""
    for name, shape in wanted.items():
        if shapes.get(name) != shape:
            raise ValueError(f"{name} should be of shape {shape}, it is {shapes.get(name, 'missing')!s:.60}")
    if more := [name for name in shapes if name not in wanted]:
        raise ValueError(f"it holds {more[0]!r:.60}, which a dictionary of this kind does not have")


def first_bytes(path: Path, count: int) -> bytes:
    """Returns the first bytes of a plain file. Raises: ValueError for a folder, a device or a pipe, which could be read
    without end; OSError if the file is not there."""
    path.stat()
    if not path.is_file():
        raise ValueError("it is no plain file")
    with path.open("rb") as file:
        return file.read(count)


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
