"""Feeds tokens to a model outside the engine: one pass over known tokens, or a continuation of prompts.

Imports, lens training, adapter evaluation, probes and patching run their models here. Runs that draft and verify are
the engine's (`cacheprobe.engine`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import CachedLM

Choose = Callable[[list[int], Tensor], list[int]]
"""Returns the next token of each text, from the texts' indices and their logits [n, v]."""


class Fed(NamedTuple):
    """What one pass over known tokens computed."""

    out: Tensor
    """What `CachedLM.forward` returned: logits [b, t, v], or the residual stream [b, t, m]."""
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
    """Runs token_ids [b, t] through the model in one pass from absolute position `start` on, and copies activations.

    sites: the (site, layer) pairs to copy; changes made by an enclosing `model.editing` are included.
    cache: holds the positions before `start` of each text, in cache rows 0 to b - 1; an empty one by default.
    num_layers, logit_slots: as in `CachedLM.forward`.
    """
    b, t = token_ids.shape
    cache = model.new_cache(b, start + t) if cache is None else cache
    states: dict[tuple[str, int], Tensor] = {}

    def keep(site: str, layer: int, value: Tensor) -> None:
        """Copies an activation."""
        states[site, layer] = value.clone()

    with model.capturing(sites, keep):
        out = model.forward(token_ids, cache, range(b), [start] * b, num_layers=num_layers, logit_slots=logit_slots)
    return Fed(out, states, cache)


def continue_texts(model: CachedLM, prompts: Sequence[Sequence[int]], length: int, choose: Choose) -> list[list[int]]:
    """Returns the prompts, each continued to `length` tokens. Every pass feeds the newest token of each text.

    Prompts of the same length are read in one pass. End tokens do not end a text.
    """
    cache = model.new_cache(len(prompts), length)
    texts = [list(prompt) for prompt in prompts]

    def extend(rows: list[int], width: int) -> None:
        """Feeds the last `width` tokens of these texts, and appends the next token of each."""
        newest = torch.tensor([texts[row][-width:] for row in rows])
        starts = [len(texts[row]) - width for row in rows]
        logits = model.forward(newest, cache, rows, starts, logit_slots=[width - 1])[:, 0]
        for row, token_id in zip(rows, choose(rows, logits), strict=True):
            texts[row].append(token_id)

    for width in sorted({len(prompt) for prompt in prompts if len(prompt) < length}):
        extend([row for row, prompt in enumerate(prompts) if len(prompt) == width], width)
    while rows := [row for row, text in enumerate(texts) if len(text) < length]:
        extend(rows, 1)
    return texts
