"""Reads the header of a GGUF file: architecture, types of its tensors, tokenizer; and refuses damaged files.

The reader of the package gguf takes seconds to do so, because it keeps every token and every tensor.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from cacheprobe.core.live import ModelError

SUFFIX = ".gguf"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's number of a value's type -> format of struct; 8 is a text and 9 an array."""
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS, _MOST_NESTED_LISTS = 4, 8
_SHARD = re.compile(rf"-\d{{5}}-of-\d{{5}}{re.escape(SUFFIX)}$", re.IGNORECASE)
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class GGUFHeader:
    """Holds what the header of a GGUF file says, without its lists."""

    fields: Mapping[str, object]
    elements: Mapping[str, int]
    """Type of tensor, such as "Q4_1" -> number of weights of that type."""
    tensors: tuple[str, ...] = ()
    """Names of the tensors, such as "blk.0.attn_q.weight"."""

    @property
    def architecture(self) -> str:
        """The model's architecture in GGUF's words, such as "llama"; "" if the header names none."""
        return str(self.fields.get("general.architecture", ""))

    @property
    def note(self) -> str:
        """Text for results: bits of most weights, their type, and all types that are not floats, the most frequent
        first; "" if all weights are floats, which are not quantised."""
        kinds = sorted(self.elements, key=lambda name: -self.elements[name])
        named = [kind for kind in kinds if kind == kinds[0] or kind not in _FLOATS]
        if named[-1] in _FLOATS:
            return ""
        bits = re.search(r"\d+", kinds[0])
        return f"{bits[0] if bits else '?'}-bit (GGUF {' and '.join(named)}), dequantised"


def gguf_file(name: str) -> Path | None:
    """Returns the GGUF file that a path means: the file itself, or the only one of a folder without config.json; None
    for another name.

    Raises: ModelError for an absent file, for several files, and for a model in parts.
    """
    path = Path(name)
    if path.is_dir():
        has_config = (path / "config.json").exists()
        files = [] if has_config else sorted(one for one in path.iterdir() if one.suffix.lower() == SUFFIX)
        if len(files) > 1:
            raise ModelError(f"{name} holds {len(files)} GGUF files; give one of them, such as {files[0]}")
        path = files[0] if files else path
    if path.suffix.lower() != SUFFIX:
        return None
    if not path.is_file():
        raise ModelError(f"there is no file {name}; give an existing .gguf file")
    if _SHARD.search(path.name):
        raise ModelError(f"{path} is one part of a model; join the parts with llama.cpp's gguf-split --merge first")
    return path


def read_header(path: Path) -> GGUFHeader:
    """Returns the header of a GGUF file. Raises: ModelError if the file is no GGUF, is cut off, or holds tensors of a
    type that the package gguf does not know."""
    try:
        with path.open("rb") as file:
            return _read(file, path.stat().st_size)
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, ValueError, KeyError, EOFError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is cut off or damaged ({error!s:.80}); get it again") from error


def _read(file: BinaryIO, size: int) -> GGUFHeader:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if file.read(4) != b"GGUF":
        raise ModelError(f"{file.name} is no GGUF file: it does not begin with GGUF")
    (version,) = _numbers(file, "I")
    if version not in (2, 3):
        raise ModelError(f"{file.name} has version {version} of GGUF; 2 and 3 are read here")
    tensors, count = _numbers(file, "QQ")
    if max(tensors, count) > size:  # each takes at least a byte
        raise ValueError(f"it names {tensors} tensors")
    fields = {_text(file, size): _value(file, size) for _ in range(count)}
    elements: dict[str, int] = {}
    names: list[str] = []
    end = 0
    for _ in range(tensors):
        names.append(name := _text(file, size))
        (dimensions,) = _numbers(file, "I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"{name:.40} has {dimensions} dimensions")
        shape = _numbers(file, "Q" * dimensions)
        kind, offset = _numbers(file, "IQ")
        if kind not in list(GGMLQuantizationType):
            raise ModelError(f"{file.name} holds tensors of type {kind}, which the package gguf does not know")
        of_block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if prod(shape) % of_block:
            raise ValueError(f"{name} has {prod(shape)} weights in blocks of {of_block}")
        kind_name = GGMLQuantizationType(kind).name
        elements[kind_name] = elements.get(kind_name, 0) + prod(shape)
        end = max(end, offset + prod(shape) // of_block * bytes_of_block)
    alignment = int(str(fields.get("general.alignment", 32)))
    if alignment < 1:
        raise ValueError(f"it names an alignment of {alignment}")
    start = -(-file.tell() // alignment) * alignment
    if start + end > size:
        raise ValueError(f"it has {size} bytes, and its header names {start + end}")
    if not elements:
        raise ValueError("it holds no tensors")
    return GGUFHeader(fields, elements, tuple(names))


def _numbers(file: BinaryIO, form: str) -> tuple[int, ...]:
    """Reads whole numbers, in the format of struct."""
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))


def _text(file: BinaryIO, size: int) -> str:
    (length,) = _numbers(file, "Q")
    if length > size:
        raise ValueError(f"it names a text of {length} bytes")
    read = file.read(length)
    if len(read) < length:
        raise EOFError("it ends inside a text")
    return read.decode()


def _value(file: BinaryIO, size: int, kind: int | None = None, depth: int = 0) -> object:
    """Reads one value; returns None for a list, whose bytes are skipped. depth: number of lists around it."""
    kind = _numbers(file, "I")[0] if kind is None else kind
    if kind == _TEXT:
        return _text(file, size)
    if kind != _ARRAY:
        size_here = struct.calcsize(f"<{_NUMBERS[kind]}")
        return struct.unpack(f"<{_NUMBERS[kind]}", file.read(size_here))[0]
    if depth == _MOST_NESTED_LISTS:
        raise ValueError(f"it has more than {depth} lists in one another")
    inner, length = _numbers(file, "IQ")
    if length > size:
        raise ValueError(f"it names a list of {length}")
    if inner in _NUMBERS:
        file.seek(length * struct.calcsize(_NUMBERS[inner]), 1)
        return None
    for _ in range(length):
        _value(file, size, inner, depth + 1)
    return None
