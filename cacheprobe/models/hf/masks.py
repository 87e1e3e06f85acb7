"""The attention mask that a model's config asks for, over the slots that attention runs over.

A sliding window needs no other cache here: every position stays in its slot and the mask hides what has left the
window, so a rollback is the same as anywhere.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache


def attention_masks(
    config: Any, cache: KVCache, positions: Int[Tensor, "b t"], dtype: torch.dtype, device: torch.device | str
) -> Tensor | dict[str, Tensor]:
    """What to pass as `attention_mask`, additive, [b, 1, t, s] each, for new tokens at `positions`.

    [b, h, t, s] where cache surgery hides something in some layers or heads alone.

    Plain causal; one windowed mask where every layer slides (Mistral); a mask for each kind of layer where the config
    lists them in `layer_types` (Qwen2, Qwen3, Gemma2, Gemma3). Hugging Face takes 4-D masks as they are and adds no
    window of its own, so the plain mask would be silently wrong beyond the window.
    Twin: transformers' own masks in an uncached forward; models.checks compares the logits at load.
    """
    heads = int(config.num_attention_heads)
    full = cache.mask_by_layer(cache.mask(positions, dtype, device), heads)
    window = sliding_window(config)
    if window is None:
        return full
    sliding = cache.mask_by_layer(cache.mask(positions, dtype, device, window), heads)
    if getattr(config, "layer_types", None):
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


def sliding_window(config: Any) -> int | None:
    """Tokens that a sliding layer of this model sees, its own included; None where no layer slides."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(config, "use_sliding_window", True)
    return int(window) if window and slides else None
