"""Checks that a model can record attention-head activations (sites q, k, v, z, pattern), with one short forward before
the run."""

from collections.abc import Sequence

import torch

from cacheprobe.core.hook_names import PATTERN, hook_name
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.feeding import feed

_TOKENS, _CAPACITY = 4, 8


def require_heads(model: CachedLM, sites: Sequence[str], layers: Sequence[int]) -> None:
    """Checks with one short forward that each head site of `sites` is captured at each layer of `layers`, with the
    right shape.

    Raises: ModelError for a site without a hook, or if the hook does not fire or gives another shape.
    """
    wanted = [(site, layer) for layer in layers for site in sites]
    token_ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    fed = feed(model, token_ids, wanted, cache=model.new_cache(1, _CAPACITY))
    shapes = {site_layer: tuple(value.shape) for site_layer, value in fed.states.items()}
    for layer in layers:
        key, value = fed.cache.keys[layer].shape, fed.cache.values[layer].shape
        heads, kv_heads = model.head_shape[0], key[1]
        expected = {
            "q": (1, _TOKENS, heads, key[3]),
            "k": (1, _TOKENS, kv_heads, key[3]),
            "v": (1, _TOKENS, kv_heads, value[3]),
            "z": (1, _TOKENS, heads, value[3]),
            PATTERN: (1, heads, _TOKENS, _CAPACITY),
        }
        for site in sites:
            if shapes.get((site, layer)) != expected[site]:
                shape = shapes.get((site, layer))
                what = "does not fire" if shape is None else f"has {list(shape)}, not {list(expected[site])}"
                raise ModelError(
                    f"{model.name}: {hook_name(site, layer)} {what}; leave {site!r} out of heads=, this architecture's "
                    "attention has other parts"
                )
