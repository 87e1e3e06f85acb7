"""Converts a GGUF file, once, to a Hugging Face folder of float32 weights in the user's cache folder."""

import json
import shutil
from pathlib import Path

from cacheprobe.core.files import sha256_of_file
from cacheprobe.models.errors import ModelError
from cacheprobe.models.quantised.gguf_header import GGUFHeader, read_header
from cacheprobe.models.smollm2 import (
    CONTENTS,
    cache_directory,
    commit_directory,
    convert_gguf,
    is_complete,
    is_shipped,
    smollm2_directory,
    status,
)

_VERSION = 1
"""Increase it when a conversion would give another result; folders of other versions are then not used."""
_KNOWN_TOKENIZERS = ("gpt-2", "smollm")
"""Ways of splitting a text before BPE that transformers, with our correction, reads as the file means them."""


def gguf_directory(gguf: Path, progress: bool = True) -> tuple[Path, str]:
    """Returns (folder with config, float32 weights and tokenizer of a GGUF file; note on the weights). The first call
    dequantises the weights with transformers and the package gguf, which takes seconds to minutes; after an error
    nothing is left of it.

    Twin: tests.quantised.twins.gguf_weights, bitwise.
    Raises: ModelError for a damaged file, an architecture or a type that the two do not read, and a full disk.
    """
    if is_shipped(gguf):
        return smollm2_directory(progress), read_header(gguf).note
    sha256 = sha256_of_file(gguf)
    target = cache_directory() / f"{gguf.stem}-{sha256[:12]}-gguf-v{_VERSION}"
    if not is_complete(target):
        header = read_header(gguf)
        _require_readable(gguf, header)
        size = 4 * sum(header.elements.values())
        _require_room(gguf, target.parent, size)

        def build(directory: Path) -> None:
            """Converts the weights into `directory`."""
            with status(f"converting {gguf.name}, once: {size / 1e6:,.0f} MB in {target.parent}", progress):
                _convert(gguf, header, directory)

        commit_directory(build, target, {"source": gguf.name, "sha256": sha256, "weights": _note(header)})
    return target, str(json.loads((target / CONTENTS).read_text())["weights"])


def _require_readable(gguf: Path, header: GGUFHeader) -> None:
    """Raises: ModelError for an architecture that transformers does not read, and types that gguf cannot dequantise."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

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
    for name in header.elements:
        kind = GGMLQuantizationType[name]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise ModelError(f"{gguf}: the package gguf cannot dequantise {name}; give another quantisation") from error


def _require_room(gguf: Path, folder: Path, size: int) -> None:
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    if (free := shutil.disk_usage(existing).free) < size * 1.1:
        raise ModelError(
            f"{gguf}: its float32 weights take {size / 1e9:.1f} GB, and {folder} has room for {free / 1e9:.1f}; set "
            "CACHEPROBE_CACHE to a larger folder"
        )


def _convert(gguf: Path, header: GGUFHeader, directory: Path) -> None:
    split = header.fields.get("tokenizer.ggml.pre") if "tokenizer.ggml.model" in header.fields else None
    try:
        missing = convert_gguf(
            gguf, directory, has_tokenizer="tokenizer.ggml.model" in header.fields, splits_digits=split == "smollm"
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ImportError) as error:
        raise ModelError(f"{gguf}: transformers cannot read it ({type(error).__name__}: {error!s:.160})") from error
    if missing:
        raise ModelError(f"{gguf} lacks {len(missing)} of the model's weights, such as {missing[0]}; get it again")


def _note(header: GGUFHeader) -> str:
    kind, split = header.fields.get("tokenizer.ggml.model"), header.fields.get("tokenizer.ggml.pre")
    is_sure = kind != "gpt2" or split in _KNOWN_TOKENIZERS
    return header.note if is_sure else f"{header.note}; tokenizer {split!r} as transformers converts it"
