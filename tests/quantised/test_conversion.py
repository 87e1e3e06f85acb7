"""A GGUF file is converted to the bytes that transformers' own from_pretrained and save_pretrained give, for every
architecture; every type of weight is dequantised as the package gguf does, or refused by name; and nothing is left of a
conversion that fails."""

import errno
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import modeling_gguf_pytorch_utils as reading

import cacheprobe as cp
from cacheprobe.core import terminal
from cacheprobe.core.files import sha256_of_file
from cacheprobe.models import converted
from cacheprobe.models.base import ModelError
from cacheprobe.models.plain.files import plain_model
from cacheprobe.models.quantised import convert
from cacheprobe.models.quantised.gguf import GGUFHeader, gguf_directory
from cacheprobe.ops.equality import bitwise
from tests.field.tiny_family import tiny_family
from tests.quantised.twins import gguf_weights
from tests.quantised.writers import WRITERS, gguf_writer, write_quantised

SMALL = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MIXED = dict(num_experts=4, num_experts_per_tok=2)
ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen2moe": ("qwen2_moe", MIXED),
    "qwen3moe": ("qwen3_moe", MIXED),
    "gemma2": ("gemma2", dict(head_dim=8)),
    "gemma3": ("gemma3_text", dict(head_dim=8)),
    "phi3": ("phi3", dict(vocab_size=32064)),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "falcon": ("falcon", {}),
    "bloom": ("bloom", dict(n_layer=2, n_head=4)),
    "gpt2": ("gpt2", dict(n_embd=32, n_layer=2, n_head=4, max_position_embeddings=1024)),
    "mamba": ("mamba", dict(state_size=4, intermediate_size=64, time_step_rank=2)),
    "lfm2": ("lfm2", dict(full_attn_idxs=[0], block_auto_adjust_ff_dim=False)),
}
"""GGUF's name of an architecture -> its type in transformers, and what a tiny model of it needs beyond SMALL."""


def as_stored(name: str, weight: np.ndarray, architecture: str) -> np.ndarray:
    """A weight in the shape that llama.cpp gives it."""
    if (
        architecture == "gpt2"
        and weight.ndim == 2
        and any(f"{part}." in name for part in ("qkv", "output", "up", "down"))
    ):
        return weight if name == "output.weight" else weight.T
    if "ssm_conv1d.weight" in name or "shortconv.conv" in name:
        return weight[:, 0]
    if "ssm_a" in name:
        return -np.exp(weight)
    return weight[0] if "ffn_gate_inp_shexp" in name else weight


def any_gguf(folder: Path, architecture: str) -> Path:
    """A GGUF file of random weights, in the names and fields from which transformers reads the architecture."""
    kind, own = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(kind, **{**SMALL, **own})
    model: Any = AutoModelForCausalLM.from_config(config)
    fields = reading.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    writer = GGUFWriter(folder / f"{architecture}.gguf", architecture)
    for field, name in fields.get(kind, fields.get(architecture, fields.get(kind.removesuffix("_text"), {}))).items():
        value = getattr(config, name, None) if isinstance(name, str) else None
        if field == "attention.head_count_kv" and architecture == "lfm2":
            writer.add_array(f"lfm2.{field}", [2, 0])
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{field}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{field}", value)
    if architecture == "lfm2":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_token_list([str(token) for token in range(config.vocab_size)])  # some vocabularies are as long as it
    processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)(config=config.to_dict())
    weights, generator = model.state_dict(), np.random.default_rng(0)
    for name, source in reading.get_gguf_hf_weights_map(model, processor).items():
        if source not in weights or (name == "output.weight" and config.tie_word_embeddings):
            continue
        value = as_stored(name, generator.normal(size=weights[source].shape).astype(np.float32), architecture)
        if name.endswith(("_gate_exps", "_up_exps")):  # two halves of one weight
            value = value[:, : value.shape[1] // 2]
        writer.add_tensor(f"{name}.weight" if name.endswith("_exps") else name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / f"{architecture}.gguf"


def by_transformers(file: Path, folder: Path) -> Path:
    """The folder that transformers itself makes of a GGUF file."""
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_folder_is_the_one_that_transformers_makes(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte; in pieces of one row. A model of floats, whose weights are not stored, is saved for that."""
    monkeypatch.setattr(convert, "_WEIGHTS_AT_ONCE", 1)
    file = any_gguf(tmp_path, architecture)
    theirs, ours = by_transformers(file, tmp_path / "theirs"), tmp_path / "ours"
    plain_model(file, "float32")[0].save_pretrained(ours)
    assert not list(tmp_path.glob("cache/*/*.safetensors"))
    with monkeypatch.context() as patched:
        patched.setattr(GGUFHeader, "note", "weights that are stored")
        patched.setenv("CACHEPROBE_CACHE", str(tmp_path / "other"))
        converted = gguf_directory(file, progress=False)[0]
    for path in theirs.iterdir():
        for folder in (converted, ours):
            assert sha256_of_file(folder / path.name) == sha256_of_file(path), f"{folder}: {path.name}"
    assert len(load_file(converted / "model.safetensors")) > 8


READ = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16", "F32"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
"""Types that llama.cpp writes and the package gguf dequantises."""


@cache
def wide() -> Any:
    """A llama whose rows hold whole blocks of every type."""
    return tiny_family("llama", dict(hidden_size=256, intermediate_size=256, head_dim=64))


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of the test."""
    monkeypatch.setenv("CACHEPROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def of_random_blocks(folder: Path, kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file of a llama whose matrices are random bytes of a type."""
    generator = np.random.default_rng(int(kind))

    def blocks(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        per_block, size = GGML_QUANT_SIZES[kind]
        return generator.integers(0, 256, (len(values), values.shape[1] // per_block * size), np.uint8)

    monkeypatch.setattr("gguf.quantize", blocks)
    monkeypatch.setitem(WRITERS, "any", gguf_writer(kind.name))
    return write_quantised("any", wide(), folder) / "tiny.gguf"


@pytest.mark.parametrize("kind", GGMLQuantizationType, ids=lambda kind: kind.name)
def test_a_type_is_dequantised_as_gguf_does_or_refused_by_name(
    kind: GGMLQuantizationType, tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, those that are no numbers included; in pieces of one row."""
    monkeypatch.setattr(convert, "_WEIGHTS_AT_ONCE", 1)
    file = of_random_blocks(tmp_path, kind, monkeypatch)
    if kind.name not in READ:
        with pytest.raises(ModelError, match=f"the package gguf cannot dequantise {kind.name}; give another"):
            cp.load_model(file)
        assert not list(folders.glob("*-v*"))
        return
    config = wide().config
    is_float, found = kind.name in ("F32", "F16", "BF16"), plain_model(file, "float32", progress=False)[0].state_dict()
    assert len(list(folders.glob("*/*.safetensors"))) == (not is_float)
    for name, weight in gguf_weights(file, config, list(found)).items():
        assert bitwise(found[name], weight), name


def with_tokenizer(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny llama with a tokenizer of three tokens."""
    own = GGUFWriter.write_header_to_file

    def write(self: GGUFWriter, *arguments: Any, **more: Any) -> None:
        self.add_tokenizer_model(kind)
        self.add_token_list(["<s>", "a", "b"])
        own(self, *arguments, **more)

    monkeypatch.setattr(GGUFWriter, "write_header_to_file", write)
    return write_quantised("GGUF Q4_1", tiny_family("llama", dict(intermediate_size=64)), folder) / "tiny.gguf"


@pytest.mark.parametrize("kind", ["rwkv", "no-such-tokenizer"])
def test_a_foreign_tokenizer_is_named_before_the_weights_are_read(
    kind: str, tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_weights", lambda *arguments: pytest.fail("the weights were read first"))
    with pytest.raises(ModelError, match=f"tiny.gguf: transformers cannot read it .*tokenizer '{kind}'"):
        cp.load_model(with_tokenizer(tmp_path, kind, monkeypatch))
    assert not [path for path in folders.iterdir() if path.is_dir()]


def test_without_a_tokenizer_prompts_are_token_ids(tmp_path: Path) -> None:
    model = cp.load_model(
        write_quantised("GGUF Q4_1", tiny_family("llama", dict(intermediate_size=64)), tmp_path) / "tiny.gguf"
    )
    assert model.tokenizer is None
    assert len(cp.run(model, [[1, 2, 3]], max_new_tokens=2, progress=False).committed(0)) == 2
    with pytest.raises(ValueError, match="token ids"):
        cp.run(model, ["a text"], max_new_tokens=2, progress=False)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["Python", "safetensors"],
)
def test_a_disk_that_becomes_full_is_named_and_nothing_is_left(
    error: Exception, tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills(self: Any, directory: Path, **options: Any) -> None:
        (directory / "model.safetensors").write_bytes(bytes(1000))
        raise error

    file = write_quantised("GGUF Q4_1", tiny_family("llama", dict(intermediate_size=64)), tmp_path) / "tiny.gguf"
    with monkeypatch.context() as patched:
        patched.setattr(transformers.PreTrainedModel, "save_pretrained", fills)
        with pytest.raises(ModelError, match=f"the disk of {folders} became full.*set CACHEPROBE_CACHE to a larger"):
            cp.load_model(file)
    assert not [path for path in folders.iterdir() if path.is_dir()]
    cp.load_model(file)  # the control


def test_progress_names_megabytes_rate_and_folder(
    tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", -1)
    file = write_quantised("GGUF Q4_1", wide(), tmp_path) / "tiny.gguf"
    gguf_directory(file)
    first, *later = capsys.readouterr().err.splitlines()
    assert first.startswith("converting tiny.gguf, once: ") and first.endswith(f" MB in {folders}")
    assert any("MB/s" in line and "left" in line for line in later)
    assert "writing them" in later[-1] and "100" not in later[0]


def test_the_hash_of_a_file_is_computed_again_when_the_file_has_changed(
    tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.mkdir()
    file, read = tmp_path / "one.gguf", []
    monkeypatch.setattr(converted, "sha256_of_file", lambda path: read.append(path) or sha256_of_file(path))
    file.write_bytes(b"first")
    before = file.stat()
    hashes = [converted.sha256_of_gguf(file) for _ in range(2)]
    assert hashes == [sha256_of_file(file)] * 2 and len(read) == 1
    time.sleep(0.02)  # longer than the step of a file system's clock
    file.write_bytes(b"other")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert converted.sha256_of_gguf(file) == sha256_of_file(file) != hashes[0]
    (folders / "sha256.json").write_text("{")
    assert converted.sha256_of_gguf(file) == sha256_of_file(file)
