"""Converts a GGUF file, once, to a Hugging Face folder of float32 weights in the user's cache folder."""

import json
import shutil
from functools import partial
from pathlib import Path

from cacheprobe.core.files import sha256_of_file
from cacheprobe.core.live import LiveModule, ModelError
from cacheprobe.models.quantised.gguf_header import GGUFHeader, read_header
from cacheprobe.models.smollm2 import (
    CONTENTS,
    cache_directory,
    commit_directory,
    convert_gguf,
    is_complete,
    is_shipped,
    require_writable,
    smollm2_directory,
    status,
)

_VERSION = 2
"""Increase it when a conversion would give another result; folders of other versions are then not used."""
_KNOWN_TOKENIZERS = ("gpt-2", "smollm")
"""Ways of splitting a text before BPE that transformers, with our correction, reads as the file means them."""


def gguf_directory(gguf: Path, progress: bool = True) -> tuple[Path, str, str]:
    """Returns (folder with config, float32 weights and tokenizer of a GGUF file; note on the weights, "" if they are
    floats; note on the tokenizer, "" if it is read as the file means it). The first call dequantises the weights with
    transformers and the package gguf, which takes seconds to minutes; after an error nothing is left of it.

    Twin: tests.quantised.twins.gguf_weights, bitwise.
    Raises: ModelError for a damaged file, for what the two do not read (an architecture, a type, rope scaling, a
    tensor), and for a cache folder that is full or cannot be written.
    """
    if is_shipped(gguf):
        return smollm2_directory(progress), read_header(gguf).note, ""
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

        notes = {"weights": header.note, "tokenizer": _tokenizer_note(header)}
        commit_directory(build, target, {"source": gguf.name, "sha256": sha256, **notes})
    stored = json.loads((target / CONTENTS).read_text())
    return target, str(stored["weights"]), str(stored["tokenizer"])


def _require_readable(gguf: Path, header: GGUFHeader) -> None:
    """Raises: ModelError for an architecture or a rope scaling that transformers does not read, and types that gguf
    cannot dequantise."""
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
    _require_plain_rope(gguf, header)
    for name in header.elements:
        kind = GGMLQuantizationType[name]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise ModelError(f"{gguf}: the package gguf cannot dequantise {name}; give another quantisation") from error


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


def _require_all_read(gguf: Path, header: GGUFHeader, live: LiveModule) -> None:
    """Raises: ModelError for a tensor that transformers gave to no parameter of the model.

    live: as transformers loaded it from the file.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=live.config.to_dict())
    read = get_gguf_hf_weights_map(live, processor)
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


def _convert(gguf: Path, header: GGUFHeader, directory: Path) -> None:
    split = header.fields.get("tokenizer.ggml.pre") if "tokenizer.ggml.model" in header.fields else None
    try:
        missing = convert_gguf(
            gguf,
            directory,
            has_tokenizer="tokenizer.ggml.model" in header.fields,
            splits_digits=split == "smollm",
            check=partial(_require_all_read, gguf, header),
        )
    except ModelError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, ImportError) as error:
        raise ModelError(f"{gguf}: transformers cannot read it ({type(error).__name__}: {error!s:.160})") from error
    if missing:
        raise ModelError(f"{gguf} lacks {len(missing)} of the model's weights, such as {missing[0]}; get it again")


def _tokenizer_note(header: GGUFHeader) -> str:
    kind, split = header.fields.get("tokenizer.ggml.model"), header.fields.get("tokenizer.ggml.pre")
    is_sure = kind != "gpt2" or split in _KNOWN_TOKENIZERS
    return "" if is_sure else f"tokenizer {split!r} as transformers converts it"
