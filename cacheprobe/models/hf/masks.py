"""Builds the attention mask that a model's config requires: causal, and limited to a sliding window if the model has
one. Reads the lengths of window, chunk and context from the config.

A sliding window needs no special cache: every position stays in its slot, and the mask hides positions that have left
the window. Rollback works as for full attention.
"""

import torch
from torch import Tensor

from cacheprobe.core.live import LiveConfig
from cacheprobe.kvcache.staged import StagedCache

_DEFAULT_CONTEXT = 2048
"""Context length in tokens of a model whose config names none, such as one with ALiBi."""


def attention_masks(
    config: LiveConfig, cache: StagedCache, dtype: torch.dtype, device: torch.device | str
) -> Tensor | dict[str, Tensor]:
    """Returns the additive mask [b, 1, t, s] for the tokens of a forward, over the first s = `cache.span` slots. If
    the config lists kinds of layers and some slide, returns a dictionary of two masks, "full_attention" and
    "sliding_attention"; for chunked layers, "full_attention" and "chunked_attention".

    The mask is [b, h, t, s] if cache surgery hides slots in some layers or heads only. Hugging Face uses a 4-D mask
    unchanged and adds no window, so a plain causal mask would be wrong beyond the window, without an error.
    Twin: transformers' own masks in an uncached forward; models.checks compares the logits at load.
    """
    config, device = text_config(config), torch.device(device)
    heads = int(getattr(config, "num_attention_heads", 0))
    plain = cache.mask(dtype, device)
    full = cache.mask_by_layer(plain, heads)
    chunk = chunk_size(config)
    if chunk is not None:
        slots, positions = torch.arange(cache.span, device=device), cache.placed(device).positions
        other = (slots // chunk != positions[..., None] // chunk)[:, None]
        chunked = plain.masked_fill(other, torch.finfo(dtype).min)
        return {"full_attention": full, "chunked_attention": cache.mask_by_layer(chunked, heads)}
    window = sliding_window(config)
    if window is None:
        return full
    sliding = cache.mask_by_layer(cache.mask(dtype, device, window), heads)
    if getattr(config, "layer_types", None):
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


def text_config(config: LiveConfig) -> LiveConfig:
    """Returns the part of a multimodal model's config that describes its text decoder; another config unchanged."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def chunk_size(config: LiveConfig) -> int | None:
    """Returns the width in tokens of the chunks inside which some layers attend; None if no layer attends by chunk.
    Source: transformers' masking_utils.create_chunked_causal_mask."""
    config = text_config(config)
    kinds = getattr(config, "layer_types", None) or ()
    return int(config.attention_chunk_size) if "chunked_attention" in kinds else None


def sliding_window(config: LiveConfig) -> int | None:
    """Returns the width of the model's sliding attention window in tokens, the token itself included; None if no layer
    has a sliding window."""
    config = text_config(config)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return int(window) if window and slides else None


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
