"""Checks which attention-head activations a model can record, with one short forward before the run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN, hook_name
from cacheprobe.models.base import CachedLM, ModelError

_TOKENS, _CAPACITY = 4, 8


def require_heads(model: CachedLM, sites: Sequence[str], layers: Sequence[int]) -> None:
    """Checks in one short forward that each head site is captured at each layer with the right shape.

    Raises: ModelError for a site without a hook, or whose hook does not fire or gives another shape.
    """
    cache = model.new_cache(1, _CAPACITY)
    seen: dict[tuple[str, int], tuple[int, ...]] = {}

    def note(site: str, layer: int, value: Tensor) -> None:
        """Notes the shape of a captured activation."""
        seen[site, layer] = tuple(value.shape)

    with model.capturing([(site, layer) for layer in layers for site in sites], note):
        model.forward(torch.zeros(1, _TOKENS, dtype=torch.long), cache, [0], [0])
    for layer in layers:
        key, value = cache.keys[layer].shape, cache.values[layer].shape
        heads, kv_heads = model.head_shape[0], key[1]
        expected = {
            "q": (1, _TOKENS, heads, key[3]),
            "k": (1, _TOKENS, kv_heads, key[3]),
            "v": (1, _TOKENS, kv_heads, value[3]),
            "z": (1, _TOKENS, heads, value[3]),
            PATTERN: (1, heads, _TOKENS, _CAPACITY),
        }
        for site in sites:
            if seen.get((site, layer)) != expected[site]:
                found = seen.get((site, layer))
                what = "does not fire" if found is None else f"has {list(found)}, not {list(expected[site])}"
                raise ModelError(
                    f"{model.name}: {hook_name(site, layer)} {what}; leave {site!r} out of heads=, this architecture's "
                    "attention has other parts"
                )
