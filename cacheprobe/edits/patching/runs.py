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
from cacheprobe.models.experts import head_places
from cacheprobe.models.feeding import feed

SiteLayer = tuple[str, int]
"""(site, layer)"""
AnswerPair = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of two answers."""


class AnswerLogits(NamedTuple):
    """Holds a run's prediction of two answers in float64. For answers of one token: their logits at the last position,
    log-sum-exp of all logits, top token. For longer ones: the log-probabilities of whole answers, and 0."""

    first: float
    """Logit of the first answer, or its log-probability in nats, the sum over its tokens."""
    second: float
    logsumexp: float
    top: int
    """Id of the largest logit; the lowest id of equal ones. Of answers of several tokens: that of the first position,
    or -1 if a later token of the first answer is not the likeliest."""


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


@torch.inference_mode()
def extend(model: CachedLM, run: Run, token_ids: tuple[int, ...]) -> Run:
    """Returns a Run of the run's tokens followed by `token_ids`, whose first positions are copied; `run` without any.
    Feed all but the last token of an answer, to read the logits of its tokens."""
    if not token_ids:
        return run
    return run_once(model, (*run.token_ids, *token_ids), {site for site, _ in run.states}, (run, len(run.token_ids)))


def read(logits: Tensor, answer: tuple[int, int]) -> list[AnswerLogits]:
    """Returns a list of AnswerLogits, one for each batch index of logits [b, v]: the prediction about two answer
    tokens."""
    values = logits.double()
    columns = (values[:, answer[0]], values[:, answer[1]], values.logsumexp(-1), values.argmax(-1))
    return [AnswerLogits(a, b, c, int(d)) for a, b, c, d in zip(*(column.tolist() for column in columns), strict=True)]


def read_whole(logits: tuple[Tensor, Tensor], answers: AnswerPair) -> list[AnswerLogits]:
    """Returns a list of AnswerLogits of answers of any length: logits [b, k, v] of the k tokens of each answer."""
    nats = []
    for values, ids in zip(logits, answers, strict=True):
        tokens = torch.tensor(ids, device=values.device).expand(len(values), -1)[..., None]
        nats.append(values.double().log_softmax(-1).gather(-1, tokens).sum((1, 2)).tolist())
    tops = logits[0].argmax(-1).tolist()
    found = [top[0] if top[1:] == list(answers[0][1:]) else -1 for top in tops]
    return [AnswerLogits(a, b, 0.0, top) for a, b, top in zip(*nats, found, strict=True)]
