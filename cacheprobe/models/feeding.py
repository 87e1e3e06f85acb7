"""Runs a model on tokens outside the engine: one pass over known tokens, a continuation of prompts, or a short pass
that shows which activations the model can record.

Imports, lens training, adapter evaluation, probes and patching run their models with these functions. Runs that draft
and verify belong to `cacheprobe.engine`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.hook_names import (
    HEAD_SHAPES,
    PATTERN,
    RECURRENT,
    ROUTER,
    hook_name,
    is_module,
    number_in,
    shape_of_heads,
)
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.experts import head_places, layers_of, state_shapes

Choose = Callable[[list[int], Tensor], list[int]]
"""Function that returns the next token id of each text, from the texts' indices and their logits [n, v]."""


class Fed(NamedTuple):
    """Holds the results of one pass over known tokens: the output, copies of activations, and the KVCache."""

    out: Tensor
    """Output of `CachedLM.forward`: logits [b, t, v], only of `logit_slots` if given, or the residual stream [b, t, m]
    if `num_layers` was given."""
    states: dict[tuple[str, int], Tensor]
    """Copies of the captured activations, [b, t, m] or [b, t, h, d], keyed by (site, layer)."""
    cache: KVCache


def feed(
    model: CachedLM,
    token_ids: Tensor,
    sites: Sequence[tuple[str, int]] = (),
    *,
    start: int = 0,
    cache: KVCache | None = None,
    num_layers: int | None = None,
    logit_slots: Sequence[int] | None = None,
) -> Fed:
    """Runs token_ids [b, t] through the model in one pass, from absolute position `start` on. Returns Fed: the output,
    copies of the activations at `sites`, and the KVCache.

    sites: the (site, layer) pairs to copy; changes made by an enclosing `model.editing` are included.
    cache: holds the positions before `start` of each text, in cache rows 0 to b - 1; a new empty cache by default.
    num_layers, logit_slots: as in `CachedLM.forward`.
    """
    b, t = token_ids.shape
    cache = model.new_cache(b, start + t) if cache is None else cache
    states: dict[tuple[str, int], Tensor] = {}

    def keep(site: str, layer: int, value: Tensor) -> None:
        """Stores a copy of an activation under its site and layer."""
        states[site, layer] = value.clone()

    with model.capturing(sites, keep):
        out = model.forward(token_ids, cache, range(b), [start] * b, num_layers=num_layers, logit_slots=logit_slots)
    return Fed(out, states, cache)


def continue_texts(model: CachedLM, prompts: Sequence[Sequence[int]], length: int, choose: Choose) -> list[list[int]]:
    """Returns the token ids of each prompt, continued until prompt and generated tokens together are `length` tokens; a
    longer prompt is returned unchanged. `choose` picks every next token from the logits; end tokens do not end a text.

    Prompts of the same length are read in one pass. Every later pass feeds the newest token of each unfinished text.
    """
    cache = model.new_cache(len(prompts), length)
    texts = [list(prompt) for prompt in prompts]

    def extend(indices: list[int], width: int) -> None:
        """Feeds the last `width` tokens of the texts `indices` in one pass, and appends a token to each text."""
        newest = torch.tensor([texts[i][-width:] for i in indices])
        starts = [len(texts[i]) - width for i in indices]
        logits = model.forward(newest, cache, indices, starts, logit_slots=[width - 1])[:, 0]
        for i, token_id in zip(indices, choose(indices, logits), strict=True):
            texts[i].append(token_id)

    for width in sorted({len(prompt) for prompt in prompts if len(prompt) < length}):
        extend([i for i, prompt in enumerate(prompts) if len(prompt) == width], width)
    while unfinished := [i for i, text in enumerate(texts) if len(text) < length]:
        extend(unfinished, 1)
    return texts


def module_places(model: CachedLM, names: Sequence[str], layers: Sequence[int]) -> list[tuple[str, int]]:
    """Returns (name, layer) of the named modules, of a name with "*" for each of `layers`. Raises: ModelError for a
    module outside of the blocks that the model lacks."""
    every = [name.replace("*", str(layer)) for name in names for layer in (layers if "*" in name else layers[:1])]
    return [located(model, name, number_in(name) or 0) for name in dict.fromkeys(every)]


def captured_places(model: CachedLM, config: CaptureConfig, layers: Sequence[int]) -> list[tuple[str, int]]:
    """Returns (site, layer) of the sites of heads at these layers, and of the modules, that a run captures."""
    return head_places(model, config.heads, layers) + module_places(model, config.modules, layers)


def located(model: CachedLM, site: str, layer: int) -> tuple[str, int]:
    """Returns (site, layer), with the layer of a module whose name holds none: 0 before the blocks, the last one after
    them. Raises: ModelError for a module that the model lacks."""
    if not is_module(site) or number_in(site) is not None:
        return site, layer
    if (layer_of := getattr(model, "module_layer", None)) is None:
        raise ModelError(
            f"{model.name} has no module {site}; name a hook point of a block, such as {hook_name('S', 0)}"
        )
    return site, layer_of(site)


_SHORT = 2, 13
"""Batch size and tokens of the pass that shows the shapes of modules: no model has 13 heads or numbers, which would
look like tokens."""


def row_shapes(model: CachedLM, places: Sequence[tuple[str, int]]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Returns the shape of one token's entry at each of these modules, from one short pass. Raises: ModelError for a
    module that the model lacks, that does not run once in a pass, or that has no entry for each token."""
    if not places:
        return {}
    seen: dict[tuple[str, int], list[tuple[int, ...]]] = {place: [] for place in places}
    if beyond := [place for place in places if not 0 <= place[1] < model.n_layers]:
        raise ModelError(f"{model.name} has layers 0 to {model.n_layers - 1}, and no module {beyond[0][0]}")
    with model.capturing(places, lambda site, layer, value: seen[site, layer].append(tuple(value.shape[2:]))):
        model.forward(torch.zeros(_SHORT, dtype=torch.long), model.new_cache(*_SHORT), range(_SHORT[0]), [0, 0])
    for (name, _), shapes in seen.items():
        if len(shapes) != 1:
            raise ModelError(f"{model.name}: {name} runs {len(shapes)} times in a pass, not once; name another module")
        if _SHORT[1] in shapes[0]:
            raise ModelError(
                f"{model.name}: {name} has {list(shapes[0])} numbers for a token, as many as there are tokens in the "
                'pass; attention weights are captured with CaptureConfig(heads=("pattern",))'
            )
    return {place: shapes[0] for place, shapes in seen.items()}


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
        expected: dict[str, tuple[int, ...]] = {
            site: (1, _TOKENS, *shape_of_heads(site, model.head_shape[0], key[1], key[3], value[3]))
            for site in HEAD_SHAPES
        }
        expected[PATTERN] = (1, model.head_shape[0], _TOKENS, _CAPACITY)
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
