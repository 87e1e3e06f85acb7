"""Runs many cells (patched runs) of a grid in one forward: each joins the batch where its states begin to differ.

The batch shares the unpatched run's keys and values of the positions before the first computed one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, RECURRENT
from cacheprobe.edits.patching.arguments import RESIDUAL_SITES
from cacheprobe.edits.patching.runs import Run, SiteLayer
from cacheprobe.kvcache.staged import SharedPrefix
from cacheprobe.models.base import CachedLM

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
    Twin: tests.twins.patching_slowly.patched_logits, close(1e-5) in float32.
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
