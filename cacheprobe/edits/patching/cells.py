"""Runs a prompt once without patches, and keeps its keys and values, its states and its prediction. Then runs many
cells (patched runs) of a grid in one forward: each joins the batch where its states begin to differ.

The batch shares the unpatched run's keys and values of the positions before the first computed one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, RECURRENT, SITES
from cacheprobe.edits.patching.arguments import RESIDUAL_SITES
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import copy_prefix
from cacheprobe.kvcache.staged import SharedPrefix
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


MOST_ROWS = 16384
"""Largest number of positions that one forward computes for all its cells, unless a single cell has more: limits the
memory."""


class Edit(NamedTuple):
    """Holds states that replace those of a patched run (cell) at one site and layer, at given positions."""

    place: SiteLayer
    positions: tuple[int, ...]
    vectors: Tensor
    """[len(positions), w]"""
    head: int | None = None
    """For HEADS and RECURRENT: which head; w is then the head's width. At RECURRENT, all heads are [n, h, d]."""

    def at(self, position: int) -> "Edit":
        """Returns the part of the edit at one of its positions."""
        index = self.positions.index(position)
        return self._replace(positions=(position,), vectors=self.vectors[index : index + 1])


@dataclass(frozen=True, eq=False)
class PatchingCell:
    """Describes one patched run of a grid: its edits, and where its computation starts."""

    edits: tuple[Edit, ...]
    """Lowest layer first. A cell without edits is the unpatched run, computed from `enters` and `start` on."""
    start: int
    """First computed position; no earlier position is edited."""
    enters: SiteLayer
    """The (site, layer) at which the cell joins the batch with the unpatched run's states: pre or S, not above its
    first edit."""


def cell(edits: Sequence[Edit], start: int | None = None) -> PatchingCell:
    """Returns a PatchingCell (description of a patched run) with these edits, which are given lowest layer first.

    start: the first computed position; by default the first edited one.
    """
    site, layer = edits[0].place
    enters = (site, layer) if site in RESIDUAL_SITES else ("pre", layer)
    return PatchingCell(tuple(edits), min(min(e.positions) for e in edits) if start is None else start, enters)


def is_idle(one: PatchingCell, base: Run) -> bool:
    """Returns True if a patched run has edits, and all of them write values that the unpatched run has anyway."""
    return bool(one.edits) and all(torch.equal(_unpatched_states(edit, base), edit.vectors) for edit in one.edits)


def _unpatched_states(edit: Edit, base: Run) -> Tensor:
    """Returns the unpatched run's states at the layer, positions and head of an edit."""
    states = base.at(*edit.place)[list(edit.positions)]
    return states if edit.head is None else states[:, edit.head]


def run_cells(model: CachedLM, base: Run, cells: Sequence[PatchingCell]) -> Tensor:
    """Runs patched runs (cells) in batches; returns the logits [len(cells), v] of the last position of each.

    base: the unpatched run that the cells change. All cells must have the same `start`.
    Twin: tests.twins.patching_slowly.naive_grid, close(1e-5) in float32.
    """
    return run_cells_to_end(model, base, cells, 1)[:, 0]


def run_cells_to_end(model: CachedLM, base: Run, cells: Sequence[PatchingCell], count: int) -> Tensor:
    """Returns the logits [len(cells), count, v] of the last `count` positions of each cell. Arguments: as in
    `run_cells`; `start` must not be after these positions."""
    (start,) = {one.start for one in cells}
    order = sorted(range(len(cells)), key=lambda i: _forward_order(cells[i].enters))
    batch_size = max(1, MOST_ROWS // (len(base.token_ids) - start)) if getattr(model, "batch_may_grow", True) else 1
    out: list[Tensor] = [base.logits[None]] * len(cells)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        for i, logits in zip(batch, _run_together(model, base, start, [cells[i] for i in batch], count), strict=True):
            out[i] = logits
    return torch.stack(out)


def _run_together(model: CachedLM, base: Run, start: int, cells: Sequence[PatchingCell], count: int) -> Tensor:
    """Runs patched runs (cells), sorted by the site and layer at which they join the batch, in one forward. Returns
    their logits [len(cells), count, v] at the last `count` positions."""
    joined = 0

    def change(site: str, layer: int, value: Tensor) -> Tensor | None:
        """Returns the batch `value` after adding the cells that join at this site and layer, and applying their edits;
        None if `value` stays the same."""
        nonlocal joined
        site_layer = (site, layer)
        num_joining = sum(one.enters == site_layer for one in cells)
        if num_joining:
            joining = base.at(*site_layer)[start:].expand(num_joining, -1, -1)
            # the first cells replace the unpatched run at batch index 0
            value = torch.cat([value, joining]) if joined else joining.clone()
            joined += num_joining
        edited = [(b, edit) for b, one in enumerate(cells[:joined]) for edit in one.edits if edit.place == site_layer]
        if site == RECURRENT:  # called after each token, whose state is the newest
            newest = start + value.shape[1] - 1
            edited = [(b, edit.at(newest)) for b, edit in edited if newest in edit.positions]
            value, first = value[:, -1:], newest
        else:
            first = start
        if not edited:
            return value if num_joining else None
        value = value if num_joining else value.clone()
        for b, edit in edited:
            slots = [position - first for position in edit.positions]
            if edit.head is None:
                value[b, slots] = edit.vectors
            else:
                value[b, slots, edit.head] = edit.vectors
        return value

    hook_points = {one.enters for one in cells} | {edit.place for one in cells for edit in one.edits}
    slots = len(base.token_ids) - start
    with model.editing(sorted(hook_points, key=_forward_order), change):
        ids = torch.tensor([base.token_ids[start:]])
        cache = SharedPrefix(base.cache, start)
        return model.forward(ids, cache, [0], [start], logit_slots=list(range(slots - count, slots)))


def _forward_order(place: SiteLayer) -> tuple[int, int]:
    """Returns a sort key of a (site, layer): the order in which a forward reaches the sites."""
    return place[1], ("pre", HEADS, RECURRENT, "T", "C", "S").index(place[0])
