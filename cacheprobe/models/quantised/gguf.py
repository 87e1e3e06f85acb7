"""Reads the header of a GGUF file, and converts the file, once, to a Hugging Face folder of float32 weights in the
user's cache folder.

The reader of the package gguf takes seconds to read a header, because it keeps every token and every tensor.
"""

import re
import shutil
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO

from cacheprobe.core.live import ModelError
from cacheprobe.core.terminal import Progress
from cacheprobe.models.converted import (
    commit_directory,
    directory_of_gguf,
    is_complete,
    require_writable,
    sha256_of_gguf,
)

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
    def float32_bytes(self) -> int:
        """Size of all weights in float32."""
        return 4 * sum(self.elements.values())

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


_KNOWN_TOKENIZERS = ("gpt-2", "smollm")
"""Ways of splitting a text before BPE that transformers, with our correction, reads as the file means them."""


def gguf_directory(gguf: Path, progress: bool = True) -> tuple[Path, str, str]:
    """Returns (folder with config, float32 weights and tokenizer of a GGUF file, without weights if the file's are
    floats; note on the weights, "" for floats; note on the tokenizer, "" if it is read as the file means it). The first
    call converts the file, which takes seconds to minutes; after an error nothing is left of it.

    Twin: tests.quantised.twins.gguf_weights, bitwise.
    Raises: ModelError as `convert`, and for a cache folder that is full or cannot be written.
    """
    sha256 = sha256_of_gguf(gguf)
    target = directory_of_gguf(gguf.stem, sha256)
    if is_complete(target):
        header = read_header(gguf)
    else:
        header = checked_header(gguf, target.parent)
        commit_directory(partial(convert, gguf, header, progress), target, {"source": gguf.name, "sha256": sha256})
    return target, header.note, _tokenizer_note(header)


def checked_header(gguf: Path, folder: Path) -> GGUFHeader:
    """Returns the header of a GGUF file that can be converted. Creates `folder`, where the converted model will be, if
    needed.

    Raises: ModelError as `read_header`; for an architecture or a rope scaling that transformers does not read; for
    types that gguf cannot dequantise; and for a `folder` that is too full or cannot be written.
    """
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    header = read_header(gguf)
    known = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})
    named = header.architecture.replace("-", "_"), header.architecture.replace("moe", "_moe"), header.architecture
    if not {*known} & {*named}:
        raise ModelError(
            f"{gguf}: transformers reads no GGUF of the architecture {header.architecture!r}, only {', '.join(known)}; "
            "give the model's Hugging Face folder"
        )
    for field in ("block_count", "embedding_length"):  # transformers would take those of its largest model
        if (name := f"{header.architecture}.{field}") not in header.fields:
            raise ModelError(f"{gguf}: its header names no {name}; convert the model again")
    _require_plain_rope(gguf, header)
    for name in header.elements:
        kind = GGMLQuantizationType[name]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise ModelError(f"{gguf}: the package gguf cannot dequantise {name}; give another quantisation") from error
    _require_room(gguf, folder, header.float32_bytes if header.note else 0)
    return header


def _require_plain_rope(gguf: Path, header: GGUFHeader) -> None:
    """Raises: ModelError for a scaling of rotary positions: transformers leaves it out, without a word."""
    changes_nothing = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1,
        "rope.scaling.attn_factor": 1,
        "rope.scale_linear": 1,
    }
    for field, plain in changes_nothing.items():
        name = f"{header.architecture}.{field}"
        if (value := header.fields.get(name, plain)) != plain:
            raise ModelError(_unread(gguf, f"{name} = {value!r}"))
    for tensor in header.tensors:
        if "rope_f" in tensor:  # rope_freqs, rope_factors_long, rope_factors_short
            raise ModelError(_unread(gguf, f"the tensor {tensor}"))


def _require_all_read(gguf: Path, header: GGUFHeader, read: Collection[str]) -> None:
    """Raises: ModelError for a tensor that is not among the names that transformers gives to a parameter."""
    for tensor in header.tensors:
        if tensor not in read and tensor.removesuffix(".weight") not in read:  # experts are named without the suffix
            raise ModelError(_unread(gguf, f"the tensor {tensor}"))


def _unread(gguf: Path, what: str) -> str:
    return f"{gguf}: transformers does not read {what}, so results would differ; give the original safetensors model"


def _require_room(gguf: Path, folder: Path, size: int) -> None:
    """Creates `folder` if needed. Raises: ModelError if it cannot be written or has no room for `size` bytes."""
    needed = size * 1.1
    try:
        require_writable(folder, needed)
    except OSError as error:
        raise ModelError(f"{gguf}: {error}") from error
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"{gguf}: its float32 weights take {_size(size)}, and {folder} has room for {_size(free)}; set "
            "CACHEPROBE_CACHE to a larger folder"
        )


def _size(count: int) -> str:
    """Returns a number of bytes as text, in MB below 1 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.{int(count < 1e7)}f} MB"


_ERRORS = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError, ImportError)
"""What transformers raises for a file that it cannot read."""


def convert(gguf: Path, header: GGUFHeader, progress: bool, directory: Path) -> None:
    """Converts a GGUF file into `directory`. progress: show a bar on stderr.

    Raises: ModelError for what transformers does not read: a tensor, a tokenizer, a file that lacks weights.
    """
    from cacheprobe.models.quantised.convert import convert_gguf

    kind, split = (header.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    megabytes = round(header.float32_bytes / 1e6)
    with Progress(megabytes, f"converting {gguf.name}", "MB", enabled=progress) as bar:
        if header.note:
            bar.say(f"converting {gguf.name}, once: {megabytes:,} MB in {directory.parent}")
        try:
            missing = convert_gguf(
                gguf,
                directory,
                has_tokenizer=kind is not None,
                splits_digits=kind is not None and split == "smollm",
                stores_weights=bool(header.note),
                check=partial(_require_all_read, gguf, header),
                report=bar.set_done,
            )
        except ModelError:
            raise
        except _ERRORS as error:
            said = " ".join(str(error).split())
            raise ModelError(f"{gguf}: transformers cannot read it ({type(error).__name__}: {said:.160})") from error
    if missing:
        raise ModelError(f"{gguf} lacks {len(missing)} of the model's weights, such as {missing[0]}; get it again")


def _tokenizer_note(header: GGUFHeader) -> str:
    kind, split = header.fields.get("tokenizer.ggml.model"), header.fields.get("tokenizer.ggml.pre")
    is_sure = kind != "gpt2" or split in _KNOWN_TOKENIZERS
    return "" if is_sure else f"tokenizer {split!r} as transformers converts it"
