"""Builds the attention mask that a model's config requires: causal, and limited to a sliding window if the model has
one.

A sliding window needs no special cache: every position stays in its slot, and the mask hides positions that have left
the window. Rollback works as for full attention.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from cacheprobe.core.live import LiveConfig
from cacheprobe.kvcache.cache import KVCache


def attention_masks(
    config: LiveConfig, cache: KVCache, positions: Int[Tensor, "b t"], dtype: torch.dtype, device: torch.device | str
) -> Tensor | dict[str, Tensor]:
    """Returns the additive mask [b, 1, t, s] for new tokens at `positions`, over the first s = `cache.span` slots. If
    the config lists kinds of layers and some slide, returns a dictionary of two masks, "full_attention" and
    "sliding_attention"; for chunked layers, "full_attention" and "chunked_attention".

    The mask is [b, h, t, s] if cache surgery hides slots in some layers or heads only. Hugging Face uses a 4-D mask
    unchanged and adds no window, so a plain causal mask would be wrong beyond the window, without an error.
    Twin: transformers' own masks in an uncached forward; models.checks compares the logits at load.
    """
    config = text_config(config)
    heads = int(getattr(config, "num_attention_heads", 0))
    plain = cache.mask(positions, dtype, device)
    full = cache.mask_by_layer(plain, heads)
    chunk = chunk_size(config)
    if chunk is not None:
        slots = torch.arange(cache.span)
        other = (slots // chunk != positions[..., None] // chunk)[:, None].to(device)
        chunked = plain.masked_fill(other, torch.finfo(dtype).min)
        return {"full_attention": full, "chunked_attention": cache.mask_by_layer(chunked, heads)}
    window = sliding_window(config)
    if window is None:
        return full
    sliding = cache.mask_by_layer(cache.mask(positions, dtype, device, window), heads)
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
