"""Runs a prompt once without patches, and keeps its keys and values, its states and its prediction."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, RECURRENT, SITES
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import copy_prefix
from cacheprobe.models.base import CachedLM
from cacheprobe.models.experts.sites import head_places
from cacheprobe.models.feeding import feed

SiteLayer = tuple[str, int]
"""(site, layer)"""


class AnswerLogits(NamedTuple):
    """Holds a run's prediction at its last position, in float64: logits of two answers, log-sum-exp of all logits, top
    token."""

    first: float
    """Logit of the first answer."""
    second: float
    logsumexp: float
    top: int
    """Id of the largest logit; the lowest id of equal ones."""


@dataclass(frozen=True, eq=False)
class Run:
    """Holds the result of one run of a prompt: token ids, cache, states by (site, layer), and logits of the last
    position."""

    token_ids: tuple[int, ...]
    cache: KVCache = field(repr=False)
    """The cache whose cache row 0 contains the prompt."""
    states: dict[SiteLayer, Tensor] = field(repr=False)
    """States by (site, layer): [n, w], or [n, h, d] at z and recurrent. S and the input of block 0 are included."""
    logits: Tensor = field(repr=False)
    """Logits [v] of the last position."""

    def at(self, site: str, layer: int) -> Tensor:
        """Returns the states of the run at a site and layer, [n, w], or [n, h, d] for single heads. Site "pre", the
        input of a block, is S of the layer before, or the stored input of block 0."""
        return self.states["S", layer - 1] if site == "pre" and layer > 0 else self.states[site, layer]

    def begins_like(self, token_ids: Sequence[int]) -> int:
        """Returns the number of leading tokens that the run shares with another prompt of the same length."""
        same = [a == b for a, b in zip(self.token_ids, token_ids, strict=True)]
        return same.index(False) if False in same else len(same)


def run_once(
    model: CachedLM,
    token_ids: Sequence[int],
    sites: Iterable[str] = (),
    after: tuple[Run, int] | None = None,
    noise: Callable[[Tensor], Tensor] | None = None,
) -> Run:
    """Runs a prompt once and returns a Run: cache, last logits, and states. The states are the input of block 0, S of
    all layers, and those of T, C, z and recurrent that `sites` names.

    after: (a run, number of first positions shared with that run); these positions are copied from that run instead of
    computed, so they have the same bits.
    noise: a function that changes the input of block 0, [n - shared, m].
    """
    first = after[1] if after is not None else 0
    cache = model.new_cache(1, len(token_ids))
    cache.allocate()
    if after is not None:
        copy_prefix(after[0].cache, cache, first)

    def add_noise(site: str, layer: int, value: Tensor) -> Tensor | None:
        """Returns the input of block 0 changed by `noise`; None (no change) if no noise was given."""
        return None if noise is None else noise(value[0])[None].to(value.dtype)

    captured = sorted({"S", *(site for site in sites if site in (*SITES, HEADS, RECURRENT))})
    places = [("pre", 0), *head_places(model, captured, range(model.n_layers))]
    with model.editing([("pre", 0)], add_noise):
        ids = torch.tensor([list(token_ids[first:])])
        fed = feed(model, ids, places, start=first, cache=cache, logit_slots=[ids.shape[1] - 1])
    kept = {place: value[0] for place, value in fed.states.items()}
    cache.extend(0, 0, len(token_ids), "prefill")
    if after is not None:
        kept = {place: torch.cat([after[0].states[place][:first], value]) for place, value in kept.items()}
    return Run(tuple(token_ids), cache, kept, fed.out[0, 0].clone())


def read(logits: Tensor, answer: tuple[int, int]) -> list[AnswerLogits]:
    """Returns a list of AnswerLogits, one for each batch index of logits [b, v]: the prediction about two answer
    tokens."""
    values = logits.double()
    columns = (values[:, answer[0]], values[:, answer[1]], values.logsumexp(-1), values.argmax(-1))
    return [AnswerLogits(a, b, c, int(d)) for a, b, c, d in zip(*(column.tolist() for column in columns), strict=True)]
