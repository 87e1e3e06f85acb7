"""Texts fed to a cached model as the engine would: ragged rows, pads, blocks that turn out wrong and are taken back."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from cacheprobe.models.base import CachedLM
from tests.tiny import VOCAB

GARBAGE = 3.0
"""Standard deviation of what stands in cache slots that nothing may read."""

_WIDTH = 6


def texts(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def fed_in_parts(model: CachedLM, rows: Sequence[Tensor], capacity: int = 64, seed: int = 0) -> dict[str, Tensor]:
    """Logits, states, keys and values of every text, by name and row; all rows in each forward, in blocks of 1 to 5.

    A third of the blocks hold wrong tokens and are fed again. Every text that has ended feeds pads at its end.
    """
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cache = model.new_cache(len(rows), capacity)
    for held in (*cache.keys, *cache.values):
        held.normal_(0, GARBAGE, generator=generator)
    now: dict[str, Tensor] = {}
    pieces: dict[str, list[Tensor]] = {}
    sites = [("pre", 0)] + [(site, layer) for layer in range(model.n_layers) for site in "STC"]
    at = [0] * len(rows)
    with model.capturing(sites, lambda site, layer, value: now.update({f"{site} {layer}": value.clone()})):
        while any(start < len(text) for start, text in zip(at, rows, strict=True)):
            sizes = [min(dice.randint(1, _WIDTH - 1), len(text) - start) for start, text in zip(at, rows, strict=True)]
            ids = torch.randint(0, VOCAB, (len(rows), _WIDTH), generator=generator)
            is_wrong = [dice.random() < 1 / 3 for _ in rows]
            for b, (text, start, size) in enumerate(zip(rows, at, sizes, strict=True)):
                if not is_wrong[b]:
                    ids[b, :size] = text[start : start + size]
            now["logits"] = model.forward(ids, cache, range(len(rows)), list(at))
            for b, size in enumerate(sizes):
                if not is_wrong[b]:
                    at[b] += size
                    for what, value in now.items():
                        pieces.setdefault(f"{what} row {b}", []).append(value[b, :size])
    out = {what: torch.cat(parts) for what, parts in pieces.items()}
    for b, text in enumerate(rows):
        for layer in range(model.n_layers):
            out[f"K {layer} row {b}"] = cache.keys[layer][b, :, : len(text)]
            out[f"V {layer} row {b}"] = cache.values[layer][b, :, : len(text)]
    return out
