"""Reads steering vectors from files: control vectors of repeng (.gguf), and safetensors with a layer in each key."""

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheprobe.lenses.dictionaries.array_files import first_bytes

GGUF_KEY = re.compile(r"direction\.(\d{1,4})")
KEY = re.compile(r"(?:\D*\.)?(\d{1,4})")
MOST_KEYS, MOST_LETTERS = 10_000, 2**20
"""Of a gguf file's header."""
_TEXT, _LIST = 8, 9
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1}
"""By the number of a value's type; the others take 8."""
MOST_NUMBERS = 2**28
"""In one file, 1 GiB in float32: more is no steering vector."""


def read_steering(path: "str | Path") -> dict[int, Tensor]:
    """Returns layer -> vector [m] in float32. The layer's number is that of the block whose output is changed.

    path: a .gguf file as repeng's `ControlVector.export_gguf` and llama.cpp write it, with tensors direction.LAYER; or
    a .safetensors file whose keys end in a layer's number, such as "12" or "layer.12".
    Source: github.com/vgel/repeng, ControlVector.export_gguf.
    Raises: ValueError for a file of another kind, a broken one, keys without a layer, a layer that is there twice,
    tensors that are not [m], vectors of different widths, and numbers that are not finite; OSError for a file that
    cannot be opened.
    """
    path = Path(path)
    readers = {".gguf": _gguf, ".safetensors": _safetensors}
    if path.suffix not in readers:
        raise ValueError(f"{path}: steering vectors are read from .gguf and .safetensors files")
    first_bytes(path, 1)  # a file that is not there gives its own error
    vectors: dict[int, Tensor] = {}
    for layer, vector in readers[path.suffix](path):
        if layer in vectors:
            raise ValueError(f"{path}: layer {layer} is there twice")
        if vector.dim() != 1 or not vector.numel():
            raise ValueError(f"{path}: the vector of layer {layer} must be [m], got {list(vector.shape)}")
        if not bool(torch.isfinite(vector).all()):
            raise ValueError(f"{path}: the vector of layer {layer} holds NaN or infinity")
        vectors[layer] = vector
    widths = sorted({len(vector) for vector in vectors.values()})
    if len(widths) != 1:
        raise ValueError(f"{path}: the vectors have the widths {widths}, which must be one")
    return dict(sorted(vectors.items()))


def _safetensors(path: Path) -> Iterator[tuple[int, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():
                if (found := KEY.fullmatch(key)) is None:
                    raise ValueError(f"{path}: key {key!r:.60} does not end in a layer's number")
                if math.prod(file.get_slice(key).get_shape()) > MOST_NUMBERS:
                    raise ValueError(f"{path}: {key} holds more than {MOST_NUMBERS} numbers")
                tensor = file.get_tensor(key)
                if not tensor.is_floating_point():
                    raise ValueError(f"{path}: {key} holds {tensor.dtype}, not floating-point numbers")
                yield int(found[1]), tensor.float()
    except (SafetensorError, OverflowError) as error:
        raise ValueError(f"{path} is no whole safetensors file ({error!s:.120})") from error


def _gguf(path: Path) -> Iterator[tuple[int, Tensor]]:
    from gguf import GGUFReader, dequantize

    try:
        _require_short_header(path)
        tensors = GGUFReader(path).tensors
    except Exception as error:  # the reader has no class of errors of its own
        raise ValueError(f"{path} is no whole gguf file ({type(error).__name__}: {error!s:.120})") from error
    if sum(int(tensor.n_elements) for tensor in tensors) > MOST_NUMBERS:
        raise ValueError(f"{path} holds more than {MOST_NUMBERS} numbers: it is a model, not a steering vector")
    for tensor in tensors:
        if (found := GGUF_KEY.fullmatch(tensor.name)) is None:
            raise ValueError(f"{path}: tensor {tensor.name!r:.60} is not named direction.LAYER: no control vector")
        try:
            numbers = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{path}: {tensor.name} is of a type that is not read ({error!s:.80})") from error
        yield int(found[1]), torch.from_numpy(numbers.copy()).float()


def _require_short_header(path: Path) -> None:
    """Raises: ValueError if a gguf file's header promises more keys, tensors or values of a list than a control vector
    has; the library would read as many. struct.error for a truncated header."""
    with path.open("rb") as file:

        def number(form: str) -> int:
            (value,) = struct.unpack(f"<{form}", file.read(struct.calcsize(form)))
            return value

        def text() -> None:
            if (length := number("Q")) > MOST_LETTERS:
                raise ValueError(f"a text of {length} bytes")
            file.seek(length, 1)

        file.seek(8)  # the mark and the version
        tensors, keys = number("Q"), number("Q")
        if max(tensors, keys) > MOST_KEYS:
            raise ValueError(f"{tensors} tensors and {keys} keys")
        for _ in range(keys):
            text()
            kind, count = number("I"), 1
            if kind == _LIST:
                kind, count = number("I"), number("Q")
            if count > MOST_KEYS or kind == _LIST:
                raise ValueError(f"a list of {count} values")
            for _ in range(count):
                text() if kind == _TEXT else file.seek(_VALUE_BYTES.get(kind, 8), 1)
