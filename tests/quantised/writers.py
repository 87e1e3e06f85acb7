"""Quantises tiny models with the libraries that are installed here, for rows of the table and for tests."""

import copy
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.loaders import load_model
from cacheprobe.models.plain.files import plain_model
from cacheprobe.models.quantised.packed import BITS_8, METHODS, dense_weight, kind_of, packed_modules

GROUP = 16
"""Number of weights that share a scale, in formats of 4 bits with groups."""

QuantisedWriter = Callable[[LiveModule, Path], None]
"""Function that quantises a tiny llama and writes it to a folder."""


def _by_transformers(config: Callable[[], object]) -> QuantisedWriter:
    def write(live: LiveModule, folder: Path) -> None:
        """Quantises while loading, and saves."""
        from transformers import AutoModelForCausalLM

        live.save_pretrained(folder / "dense")
        loaded: LiveModule = AutoModelForCausalLM.from_pretrained(
            folder / "dense", quantization_config=config(), dtype=torch.float32
        )
        loaded.save_pretrained(folder)

    return write


def _bitsandbytes(**settings: object) -> QuantisedWriter:
    def config() -> object:
        """Returns transformers' config of bitsandbytes."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig.from_dict(settings)

    return _by_transformers(config)


def _torchao(name: str, dtype: str | None = None) -> QuantisedWriter:
    def config() -> object:
        """Returns transformers' config of torchao. dtype: of the weights, with a scale for each group."""
        from transformers import TorchAoConfig

        library: LiveModule = importlib.import_module("torchao.quantization")
        if dtype is None:
            return TorchAoConfig(getattr(library, name)())
        return TorchAoConfig(
            getattr(library, name)(weight_dtype=getattr(torch, dtype), granularity=library.PerGroup(GROUP))
        )

    return _by_transformers(config)


def _compressed(form: str, bits: int, kind: str = "int", rounds_activations: bool = False) -> QuantisedWriter:
    def write(live: LiveModule, folder: Path) -> None:
        """Sets one scale for each group of 4-bit weights, or each output; then packs and saves."""
        library: LiveModule = importlib.import_module("compressed_tensors.quantization")
        compressors: LiveModule = importlib.import_module("compressed_tensors.compressors")
        rule = dict(strategy="group", group_size=GROUP) if bits == 4 else dict(strategy="channel")
        weights = library.QuantizationArgs(num_bits=bits, type=kind, symmetric=True, **rule)
        inputs = dict(num_bits=8, type=kind, strategy="token", dynamic=True)
        scheme = library.QuantizationScheme(
            targets=["Linear"],
            weights=weights,
            input_activations=library.QuantizationArgs(**inputs) if rounds_activations else None,
        )
        config = library.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=form)
        library.apply_quantization_config(live, config)
        for module in live.modules():
            if isinstance(module, nn.Linear) and hasattr(module, "weight_scale"):
                scaled: LiveModule = module
                parts = scaled.weight.detach().view(len(scaled.weight), -1, GROUP if bits == 4 else scaled.in_features)
                scale, _ = library.utils.calculate_qparams(parts.amin(-1), parts.amax(-1), weights)
                scaled.weight_scale.data.copy_(scale.view_as(scaled.weight_scale))
        compressor = compressors.ModelCompressor.from_pretrained_model(live)
        compressor.compress_model(live)
        live.save_pretrained(folder)
        compressor.update_config(folder)

    return write


def gguf_writer(kind_name: str) -> QuantisedWriter:
    def write(live: LiveModule, folder: Path) -> None:
        """Writes a GGUF file of a llama, without a tokenizer; norms stay in float32."""
        from gguf import GGMLQuantizationType, GGUFWriter, quantize

        config, kind = live.config, GGMLQuantizationType[kind_name]
        writer = GGUFWriter(folder / "tiny.gguf", "llama")
        writer.add_custom_alignment(32)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        for name, weight in live.state_dict().items():
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
                name.split(".")[-2]
            )
            if heads is not None:  # llama.cpp rotates neighbours, transformers the two halves of a head
                weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            values = weight.contiguous().numpy()
            packed = values if values.ndim == 1 else quantize(values, kind)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=None if values.ndim == 1 else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "o_proj": "attn_output",
}


def gguf_name(name: str) -> str:
    """Returns the name in GGUF of a llama's weight, such as "blk.0.attn_q.weight"."""
    *path, module, weight = name.removeprefix("model.").split(".")
    part = module.partition("_")[0]
    own = _GGUF_NAMES.get(module) or (f"attn_{part}" if part in ("q", "k", "v") else f"ffn_{part}")
    return f"blk.{path[1]}.{own}.{weight}" if path else f"{own}.{weight}"


WRITERS: Mapping[str, QuantisedWriter] = {
    "GGUF Q4_0": gguf_writer("Q4_0"),
    "GGUF Q4_1": gguf_writer("Q4_1"),
    "GGUF Q8_0": gguf_writer("Q8_0"),
    "bitsandbytes nf4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes nf4 nested": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes fp4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "bitsandbytes int8": _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
    "torchao int8": _torchao("Int8WeightOnlyConfig"),
    "torchao int4": _torchao("IntxWeightOnlyConfig", "int4"),
    "torchao float8": _torchao("Float8WeightOnlyConfig"),
    "compressed-tensors int4": _compressed("pack-quantized", 4),
    "compressed-tensors int8": _compressed("pack-quantized", 8),
    "compressed-tensors int8 activations": _compressed("int-quantized", 8, rounds_activations=True),
    "compressed-tensors float8": _compressed("float-quantized", 8, "float"),
}
"""Name of a format -> function that writes a tiny llama in it."""


def write_quantised(name: str, live: LiveModule, folder: Path) -> Path:
    """Writes a tiny llama to `folder` in the format `name`, one of WRITERS, and returns the folder.

    Raises: ModelError if the format's library is not installed.
    """
    method = METHODS.get(name.split()[0])
    if method is not None and importlib.util.find_spec(method.package) is None:
        raise ModelError(f"{method.to_install} is not installed; pip install {method.to_install}")
    WRITERS[name](live, folder)
    return folder


def load_quantised(name: str, live: LiveModule) -> tuple[CachedLM, LiveModule]:
    """Quantises a tiny llama, and returns (the model behind our loader, the transformers model to compare with): the
    model with dequantised weights, or, where activations are rounded too, the untouched one.

    Raises: ModelError if the library is not installed, or does not run on this processor.
    """
    dense = copy.deepcopy(live)
    with tempfile.TemporaryDirectory() as temporary, _own_cache(Path(temporary) / "cache"):
        folder = Path(temporary) / "model"
        folder.mkdir()
        write_quantised(name, live, folder)
        original, _, _ = plain_model(folder, "float32", progress=False)
        loaded = load_model(folder, products="torch", progress=False)
    packed = packed_modules(original)
    if not packed or any(kind_of(module) == BITS_8 for module in packed.values()):
        return loaded, original
    weights = {f"{path}.weight": dense_weight(module) for path, module in packed.items()}
    dense.load_state_dict({**dense.state_dict(), **weights})
    return loaded, dense


@contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """Keeps converted models in `folder` inside the `with`."""
    before = os.environ.get("CACHEPROBE_CACHE")
    os.environ["CACHEPROBE_CACHE"] = str(folder)
    try:
        yield
    finally:
        del os.environ["CACHEPROBE_CACHE"]
        if before is not None:
            os.environ["CACHEPROBE_CACHE"] = before
