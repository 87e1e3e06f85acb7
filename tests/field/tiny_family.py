"""Builds a tiny model with random weights of any causal family of the installed transformers."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cacheprobe.core.live import LiveConfig

VOCAB = 97
LAYERS = 4
MOST_WEIGHTS = 40_000_000
"""A family whose smallest config is larger than this is not built."""

Fields = Mapping[str, object]

_SMALL: Fields = {
    **dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4),
    **dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=256, query_pre_attn_scalar=8, d_ff=48),
    **dict(d_model=32, n_embd=32, n_layer=LAYERS, n_layers=LAYERS, n_head=4, n_heads=4, n_positions=256, n_ctx=256),
    **dict(ffn_dim=48, ffn_hidden_size=48, dff=48, rotary_dim=4, max_seq_len=256, embedding_size=32),
    **dict(num_local_experts=4, num_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2),
    **dict(moe_intermediate_size=24, shared_expert_intermediate_size=24, n_group=1, topk_group=1),
    **dict(shared_intermediate_size=24, first_k_dense_replace=1, moe_k=2, intermediate_size_mlp=48),
    **dict(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, qk_head_dim=16),
    **dict(decoder_layers=LAYERS, decoder_attention_heads=4, decoder_ffn_dim=48, sliding_window=8),
    **dict(attention_chunk_size=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB),
    **dict(pad_token_id=VOCAB - 1, bos_token_id=VOCAB - 2, eos_token_id=VOCAB - 3, is_decoder=True, dim_model_base=32),
    **dict(initializer_range=0.2, residual_multiplier=0.7, logits_scaling=2.0, embedding_multiplier=3.0),
    **dict(kv_channels=8, local_window_size=8, index_topk=4, index_n_heads=2, index_head_dim=8),
    **dict(image_size=28, patch_size=14),
}
_UNLESS_SET = ("sliding_window", "attention_chunk_size")
"""Fields that stay as they are where the family's own default is None."""

_MAMBA2: Fields = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=16, mamba_chunk_size=4)
_OWN: Mapping[str, Fields] = {
    "blt": dict(encoder_hash_byte_group_vocab=VOCAB, encoder_hash_byte_group_size=[3]),
    "dbrx": dict(
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "gemma4_text": dict(head_dim=8, global_head_dim=16),
    "gemma4_unified_text": dict(head_dim=8, global_head_dim=16),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "mllama_text_model": dict(cross_attention_layers=[1]),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=8),
    "dots1": dict(n_shared_experts=1),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2, num_dense_layers=1),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=2, state_size=16, chunk_size=4),
    "bamba": dict(attn_layer_indices=[1, 3], **_MAMBA2),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"] * 2, **_MAMBA2),
    "falcon_h1": dict(
        **dict(mamba_d_ssm=64, ssm_in_multiplier=0.8, ssm_out_multiplier=0.6, attention_in_multiplier=0.9),
        **dict(attention_out_multiplier=1.3, lm_head_multiplier=0.5, **_MAMBA2),
    ),
    "nemotron_h": dict(
        layer_types=["linear_attention", "moe", "full_attention", "mlp"],
        **dict(mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=16, chunk_size=4),
        moe_shared_expert_intermediate_size=24,
    ),
    "zamba": dict(layer_types=["linear_attention", "hybrid"] * 2, n_mamba_heads=2),
    "zamba2": dict(
        layers_block_type=["linear_attention", "hybrid"] * 2,
        **dict(num_mem_blocks=2, use_shared_attention_adapter=True, adapter_rank=4, use_mem_rope=True),
        **dict(num_key_value_heads=4, attention_head_dim=16, mamba_d_state=16, mamba_ngroups=2, chunk_size=4),
    ),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "xlstm": dict(hidden_size=128, num_heads=4),  # with fewer, its cache and its layers differ in their shapes
    "ernie4_5_moe": dict(moe_k=2),
    "zaya": dict(num_experts_per_tok=1),
}


_NONE: Fields = MappingProxyType({})


class NotBuilt(ValueError):
    """Raised if transformers does not build this family as a tiny text model; the message says why."""


def families() -> dict[str, str]:
    """Returns a dictionary: model type -> name of the class, of every causal family of the installed transformers."""
    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def tiny_config(family: str, fields: Fields = _NONE) -> LiveConfig:
    """Returns a config of `family` with small dimensions. fields: set in place of the small ones.

    Raises: whatever the family's config class raises.
    """
    config_class: LiveConfig = CONFIG_MAPPING[family]
    default: LiveConfig = config_class()
    names = {**dict(getattr(config_class, "attribute_map", None) or {})}
    chosen: dict[str, object] = {}
    for name, value in _SMALL.items():
        own = _value(default, name)
        if own is _ABSENT or (own is None and name in _UNLESS_SET) or not _is_settable(config_class, name):
            continue
        chosen[name] = value
    if "qk_rope_head_dim" in chosen:  # latent attention: the head's rotated part has a width of its own
        chosen.pop("head_dim", None)
        chosen["num_key_value_heads"] = 4
    for name in getattr(config_class, "sub_configs", {}):  # the text, vision and audio parts of a multimodal model
        part = str(getattr(_value(default, name), "model_type", ""))
        if part in CONFIG_MAPPING:
            chosen[name] = tiny_config(part, fields if name == "text_config" else _NONE)
    chosen |= dict(_OWN.get(family, {})) | (dict(fields) if "text_config" not in chosen else {})
    for name, target in names.items():
        if target in chosen:
            chosen.pop(name, None)
    layers = int(str(chosen.get("num_hidden_layers", LAYERS)))
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(_listed(_value(default, name))))
        if kinds and name not in chosen and _is_settable(config_class, names.get(name, name)):
            chosen[name] = [kinds[layer % len(kinds)] for layer in range(layers)]
    return config_class(**chosen)


_ABSENT = object()


def _value(config: LiveConfig, name: str) -> object:
    try:
        return getattr(config, name, _ABSENT)
    except Exception:  # fields that differ between layers refuse to be read
        return _ABSENT


def _listed(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def _is_settable(config_class: type[object], name: str) -> bool:
    found = getattr(config_class, name, None)
    return not (isinstance(found, property) and found.fset is None)


def tiny_family(family: str, fields: Fields = _NONE, seed: int = 0) -> PreTrainedModel:
    """Returns a tiny model of `family` in float32 with random weights, in eval mode. Every weight is random, also those
    that transformers initialises to 0 or 1: a step that multiplies by 1 would otherwise not be seen.

    Raises: NotBuilt for a family that stays large, and for whatever its classes raise.
    """
    try:
        model = _build(family, fields, seed)
    except Exception as error:  # whatever a config class or a model class of transformers objects to
        raise NotBuilt(str(error)) from error
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.nan_to_num_(0.0).add_(noise * (0.3 if weight.dim() < 2 else 0.2))
        for name, scale in model.named_buffers():
            if name.endswith("scalar"):  # a trained number that transformers keeps as a buffer of 1
                scale.fill_(0.9)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model


def _build(family: str, fields: Fields, seed: int) -> PreTrainedModel:
    config = tiny_config(family, fields)
    model_class = getattr(transformers, families()[family])
    if model_class.config_class is type(config.get_text_config()):  # as AutoModelForCausalLM does
        config = config.get_text_config()
    with torch.device("meta"):
        size = sum(weight.numel() for weight in model_class(config).parameters())
    if size > MOST_WEIGHTS:
        raise ValueError("some of its parts have a fixed size, too large for a tiny model")
    torch.manual_seed(seed)
    return model_class(config).float().eval()
