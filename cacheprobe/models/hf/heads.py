"""Checks that a model can record attention-head activations (sites q, k, v, z, pattern) and routing, with one short
forward before the run."""

from collections.abc import Sequence

import torch

from cacheprobe.core.hook_names import PATTERN, RECURRENT, ROUTER, hook_name
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.experts.sites import head_places, layers_of, state_shapes
from cacheprobe.models.feeding import feed

_TOKENS, _CAPACITY = 4, 8


def require_heads(model: CachedLM, sites: Sequence[str], layers: Sequence[int]) -> None:
    """Checks with one short forward that each head site of `sites` is captured at each layer of `layers`, with the
    right shape.

    Raises: ModelError for a site without a hook, or if the hook does not fire or gives another shape.
    """
    wanted = head_places(model, sites, layers)
    mixtures = layers_of(model)
    if ROUTER in sites and not any(site == ROUTER for site, _ in wanted):
        there = (
            f"has experts at layers {', '.join(map(str, mixtures))}"
            if mixtures
            else "has no experts whose routing is known here"
        )
        raise ModelError(f"{model.name} {there}, and routing of layers {list(layers)} was asked for; change heads=")
    states = state_shapes(model)
    if RECURRENT in sites and not any(site == RECURRENT for site, _ in wanted):
        there = f"has recurrent states at layers {', '.join(map(str, states))}" if states else "has no recurrent states"
        raise ModelError(f"{model.name} {there}, and those of layers {list(layers)} were asked for; change heads=")
    token_ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    fed = feed(model, token_ids, wanted, cache=model.new_cache(1, _CAPACITY))
    shapes = {site_layer: tuple(value.shape) for site_layer, value in fed.states.items()}
    for layer in layers:
        source = getattr(model, "sources", {}).get(layer, layer)  # of a layer that attends over another one's keys
        key, value = fed.cache.keys[source].shape, fed.cache.values[source].shape
        heads, kv_heads = model.head_shape[0], key[1]
        expected: dict[str, tuple[int, ...]] = {
            "q": (1, _TOKENS, heads, key[3]),
            "k": (1, _TOKENS, kv_heads, key[3]),
            "v": (1, _TOKENS, kv_heads, value[3]),
            "z": (1, _TOKENS, heads, value[3]),
            PATTERN: (1, heads, _TOKENS, _CAPACITY),
        }
        if layer in mixtures:
            expected[ROUTER] = (1, _TOKENS, mixtures[layer].top_k, 2)
        if layer in states:
            expected[RECURRENT] = (1, _TOKENS, *states[layer])
        for site in expected:
            if (site, layer) not in wanted:
                continue
            if shapes.get((site, layer)) != expected[site]:
                shape = shapes.get((site, layer))
                what = "does not fire" if shape is None else f"has {list(shape)}, not {list(expected[site])}"
                raise ModelError(
                    f"{model.name}: {hook_name(site, layer)} {what}; leave {site!r} out of heads=, this architecture's "
                    "attention has other parts"
                )
