"""Reads from a model's config how long a text it computes."""

from cacheprobe.core.live import LiveConfig

_DEFAULT_CONTEXT = 2048
"""Context length in tokens of a model whose config names none, such as one with ALiBi."""


def context_length(config: LiveConfig) -> int:
    """Returns the context length in tokens. Llama 4 scales queries by the length that it asks of the cache, which is
    one number for a batch; up to floor_scale tokens the scale is 1. For LongRoPE, see `longrope_length`."""
    tuned_from = int(config.floor_scale) - 1 if getattr(config, "attn_temperature_tuning", None) else None
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    names += ("max_inference_chunksize",)  # xLSTM has no limit; longer texts it splits before our cache sees them
    found = [getattr(config, name, None) for name in names]
    context = next((int(one) for one in found if isinstance(one, int) and one > 0), _DEFAULT_CONTEXT)
    return min(limit for limit in (context, tuned_from, longrope_length(config)) if limit is not None)


def longrope_length(config: LiveConfig) -> int | None:
    """Returns the number of tokens up to which LongRoPE rotates by its short factors; None for another kind of rotary
    embedding. With a longer text in a pass, the factors of all its rows switch, also of those that are shorter.
    Source: Ding et al. 2024 (arXiv 2402.13753); transformers.modeling_rope_utils.dynamic_rope_update."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one for each kind of layer
    lengths = [part["original_max_position_embeddings"] for part in parts if part.get("rope_type") == "longrope"]
    return min(map(int, lengths), default=None)
