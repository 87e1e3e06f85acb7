"""Runs a model on tokens outside the engine: one pass over known tokens, or a continuation of prompts.

Imports, lens training, adapter evaluation, probes and patching run their models with these functions. Runs that draft
and verify belong to `cacheprobe.engine`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import CachedLM

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
