"""Tiny random models of every causal language model that the installed transformers has.

transformers' own model testers do not come with its wheel. This module fills in the same sizes by the same idea: every
size field that a config class has gets a small number, and all other settings keep their defaults.
"""

import inspect
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HIDDEN, LAYERS, HEADS, VOCAB, CONTEXT, SLIDING_WINDOW = 32, 2, 4, 97, 128, 8
MOST_PARAMETERS = 40_000_000
SPREAD = 0.3
"""Standard deviation of random weights: large enough that every prompt leads to another text."""

_SIZES_OF = (
    (HIDDEN, "hidden_size d_model n_embd embedding_size emb_dim hidden_size_per_layer_input"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers"),
    (LAYERS, "num_encoder_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    (HEADS, "attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads"),
    (HEADS, "linear_num_heads index_n_heads mamba_n_heads mamba_num_heads n_mamba_heads"),
    (2, "num_key_value_heads swa_num_key_value_heads linear_num_key_heads linear_num_value_heads"),
    (HIDDEN // HEADS, "head_dim swa_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_size"),
    (HIDDEN // HEADS, "kv_channels dim_head query_pre_attn_scalar index_head_dim linear_head_dim global_head_dim"),
    (HIDDEN // HEADS, "linear_key_head_dim linear_value_head_dim mamba_head_dim"),
    (HIDDEN // 2, "kv_lora_rank q_lora_rank o_lora_rank"),
    (2 * HIDDEN, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff dff dim_ff d_inner n_inner"),
    (2 * HIDDEN, "ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size"),
    (2 * HIDDEN, "feed_forward_size intermediate_size_mlp shared_experts_intermediate_size"),
    (HIDDEN // 2, "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k num_experts_per_token"),
    (1, "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group n_groups mamba_n_groups"),
    (1, "first_k_dense_replace"),
    (2, "type_vocab_size"),
    (VOCAB, "vocab_size vocab_size_per_layer_input"),
    (CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions"),
)
_SIZES: dict[str, Any] = {name: size for size, names in _SIZES_OF for name in names.split()}
_WINDOWS = ("sliding_window", "sliding_window_size")
"""Set only for families that slide by default."""
_SIZES |= {"is_decoder": True, "is_encoder_decoder": False}

_ONE_OF_EACH = ["linear_attention", "full_attention"]
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1]),
    "blt": dict(
        encoder_hash_byte_group_vocab=VOCAB,
        encoder_hash_byte_group_size=[3],
        patcher_config=dict(hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=64),
    ),
    "codegen": dict(rotary_dim=4),
    "cohere_compass_text": dict(rope_parameters={"full_attention": dict(rope_type="default", rope_theta=1e4)}),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=1e4)),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "gptj": dict(rotary_dim=4),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": dict(layer_types=_ONE_OF_EACH),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(head_dim=16, num_heads=4),
    "mllama": dict(
        text_config=dict(
            **dict(hidden_size=HIDDEN, num_hidden_layers=4, num_attention_heads=HEADS, num_key_value_heads=2),
            **dict(intermediate_size=64, vocab_size=VOCAB, max_position_embeddings=CONTEXT, pad_token_id=0),
            cross_attention_layers=[1],  # skipped for a text, so the layers with keys are not numbered in a row
        )
    ),
    "moshi": dict(audio_vocab_size=VOCAB),
    "qwen4_exp_text": dict(layer_types=None),
    "reformer": dict(axial_pos_embds_dim=[16, 16], axial_pos_shape=[8, 16]),
    "roc_bert": dict(shape_vocab_size=VOCAB, pronunciation_vocab_size=VOCAB),
    "zamba": dict(num_hidden_layers=4, layer_types=["linear_attention", "hybrid"] * 2),
    "zamba2": dict(layer_types=["linear_attention", "hybrid"]),
    "xlstm": dict(hidden_size=128),
    "zaya": dict(num_experts_per_tok=1),
}
"""Settings that a family needs beside its sizes."""


class NotTried(Exception):
    """transformers cannot build or run this family as a tiny text model; the message says why."""


def model_types() -> list[str]:
    """Returns every model type of transformers' causal-language-model mapping, in alphabetical order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def class_name(model_type: str) -> str:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


def tiny_family(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Returns a tiny float32 model in eval mode, with random weights and no stop token.

    Raises: NotTried if transformers needs another package or refuses the tiny sizes.
    """
    try:
        config = _config(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}))
        model_class = getattr(transformers, class_name(model_type))
        if not isinstance(config, model_class.config_class or object):
            config = _part_for(model_class, config)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in model_class(config).parameters())
        if size > MOST_PARAMETERS:
            raise NotTried(f"its tiny model would have {size:,} parameters")
        torch.manual_seed(seed)
        model = model_class(config).float().eval()
    except NotTried:
        raise
    except Exception as error:
        raise NotTried(f"transformers does not build it: {type(error).__name__}: {error!s:.200}") from error
    _spread(model, seed)
    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)
    return model


def _config(config_class: Any, settings: dict[str, Any]) -> Any:
    """Returns a config whose sizes are small, with those of its text part if it has one."""
    names = inspect.signature(config_class.__init__).parameters
    filled = {name: size for name, size in _SIZES.items() if name in names}
    filled |= {name: SLIDING_WINDOW for name in _WINDOWS if name in names and names[name].default}
    if "kv_lora_rank" in names:  # keys and values are compressed, and every head has its own
        filled["num_key_value_heads"] = HEADS
    filled |= {name: i for i, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")) if name in names}
    if "layer_types" in names and "layer_types" not in settings:
        filled |= _layers_of_each_kind(config_class)
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in names:
            if part is transformers.AutoConfig:
                part = type(getattr(config_class(), name))
            filled[name] = _config(part, settings.get(name, {})).to_dict()
    return config_class(**{**filled, **settings})


def _layers_of_each_kind(config_class: Any) -> dict[str, Any]:
    """Returns settings for one layer of each kind that the default model has, and for two layers at least."""
    kinds = list(dict.fromkeys(getattr(config_class(), "layer_types", None) or ()))
    if len(kinds) < 2:
        return {}
    return dict(layer_types=kinds, num_hidden_layers=len(kinds))


def _part_for(model_class: Any, config: Any) -> Any:
    """Returns the part of a config of several models that this class is made from."""
    parts = [getattr(config, name) for name in config.sub_configs]
    fitting = [part for part in parts if isinstance(part, model_class.config_class)]
    return fitting[0] if fitting else config.get_text_config()


def _spread(model: PreTrainedModel, seed: int) -> None:
    """Draws all weights anew, so that no family's own initialisation leaves its logits nearly constant."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=draw)
            is_scale = weight.dim() < 2 and path.endswith("weight")
            if is_scale:
                weight.copy_(1 + 0.1 * noise)
            else:  # a scaled and tied embedding must not drown what the blocks add
                weight.copy_(noise * (SPREAD / 3 if "embed" in path or "wte" in path else SPREAD))
