"""Refuses models whose memory our KVCache cannot compute or roll back, by their configs."""

from cacheprobe.core.live import LiveConfig
from cacheprobe.models.base import ModelError
from cacheprobe.models.checks import LONGEST_PROBE
from cacheprobe.models.hf.masks import chunk_size, sliding_window, text_config

SLIDING_FAMILIES = (
    *("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "cohere2", "cwm", "exaone4", "granite_swa", "llama4_text"),
    *("ministral", "modernbert-decoder", "olmo3", "vaultgemma", "gpt_oss", "afmoe", "cohere2_moe", "exaone_moe"),
    *("flint", "granitemoe_swa", "kolibri1", "mimo_v2_flash"),
    *("gemma3", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "llama4"),
)
"""Model types whose sliding windows or chunks were compared with Hugging Face's own, on longer texts. Of a multimodal
model, its own type and that of its text decoder are asked for."""


RECURRENT_KINDS = ("linear_attention", "conv", "hybrid")
"""Kinds of layers whose state our cache keeps after every token; a hybrid one has keys and values, too."""
_KNOWN_KINDS = ("full_attention", "sliding_attention", "chunked_attention", *RECURRENT_KINDS, "mlp", "moe")
_RECURRENT_FAMILIES = ("rwkv", "xlstm")
"""Model types whose layers are all recurrent, without a list of kinds."""


def has_recurrent_layers(config: LiveConfig) -> bool:
    """Returns True if a config lists layers that keep a recurrent state."""
    config = text_config(config)
    is_named = getattr(config, "model_type", None) in _RECURRENT_FAMILIES
    return is_named or bool({*RECURRENT_KINDS} & set(getattr(config, "layer_types", None) or ()))


def refuse_unknown_memory(config: LiveConfig, architecture: str) -> None:
    """Checks a model's config for parts that our KVCache cannot compute or roll back. Raises: ModelError for
    encoder-decoders, recurrent states, local or bidirectional attention, several residual streams, keys of another
    model, and windows that no test covers."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{architecture} is an encoder-decoder; cacheprobe runs decoder-only models")
    types = {config.model_type, text_config(config).model_type}
    config = text_config(config)
    kinds = set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {*_KNOWN_KINDS})
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ModelError(
            f"{architecture} has local attention layers, whose rollback is not defined yet; use a model with full "
            "attention in every layer"
        )
    if others:
        raise ModelError(
            f"{architecture} has {' and '.join(others)} layers, whose rollback is not defined yet; use a model with "
            "full attention in every layer"
        )
    # "vision": only the tokens of images see later ones; `check_plain` tries whether a text stays causal
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelError(f"{architecture} attends in both directions; cacheprobe runs models that generate")
    if (streams := getattr(config, "altup_num_inputs", 1)) > 1:
        raise ModelError(
            f"{architecture} has {streams} residual streams (AltUp), of which attention and MLP change one and the "
            "logits read all, so no single S, T or C is what a layer computes; use a model with one stream"
        )
    if 0 < getattr(config, "num_hidden_layers", 0) <= (getattr(config, "num_kv_shared_layers", 0) or 0):
        raise ModelError(
            f"{architecture} has no keys and values of its own: all its layers read another model's, for which it "
            "drafts; give that model"
        )
    window = sliding_window(config) or chunk_size(config)
    is_tried = types <= set(SLIDING_FAMILIES) or (window is not None and window + 8 <= LONGEST_PROBE)
    is_whole = window is not None and window >= (getattr(config, "max_position_embeddings", None) or window + 1)
    if window is not None and not is_whole and not is_tried:
        raise ModelError(
            f"{architecture} attends over a window of {window}; set config.sliding_window=None and stay within it, or "
            f"use a model with full attention. Windows are tried for {', '.join(SLIDING_FAMILIES)}"
        )
    for field in (
        "attention_window_size",
        "attention_chunk_size",
        "state_size",
        "ssm_state_size",
        "linear_num_value_heads",
        "mamba_d_state",
    ):
        if has_recurrent_layers(config):  # `check_plain` compares what they compute at load
            break
        if getattr(config, field, None) and not (field == "attention_chunk_size" and kinds):
            raise ModelError(
                f"{architecture} keeps a bounded or recurrent state ({field}), whose rollback is not defined yet; "
                "use a model with full attention in every layer"
            )
