"""Runs prefix patching: patches every position up to one position, at one layer."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Unpack

import torch

from cacheprobe.edits.patching.answers import Answer
from cacheprobe.edits.patching.arguments import RESIDUAL_SITES, GridOptions, check_site
from cacheprobe.edits.patching.cells import Edit, PatchingCell
from cacheprobe.edits.patching.grid import PatchingGrid
from cacheprobe.edits.patching.pair import PatchedPair, grid_of_pair
from cacheprobe.edits.patching.runs import Run
from cacheprobe.edits.patching.sweep import Group, Index
from cacheprobe.models.base import CachedLM
from cacheprobe.models.prompts import Prompt


@torch.inference_mode()
def prefix(
    model: CachedLM,
    clean: Prompt,
    corrupt: Prompt,
    *,
    site: str = "S",
    answer: "Sequence[Answer] | None" = None,
    **options: Unpack[GridOptions],
) -> PatchingGrid:
    """Computes prefix patching: for each layer and position p, the corrupted prompt is run with the clean run's states
    of that layer at positions 0 to p. Returns a PatchingGrid.

    The table has the columns of `activation` except head.
    site: S, or "pre"; other arguments and errors as in `activation`.
    Source: Li, Guo and Andreas 2025 (arXiv 2503.02854), prefix patching.
    Twin: tests.twins.patching_slowly.naive_grid, close(1e-5) in float32.
    """
    check_site(site, RESIDUAL_SITES)
    pair = PatchedPair.of(model, clean, corrupt, answer, (), options)

    def indices(position: int) -> list[Index]:
        """Returns a list of the indices (layer, position) of the patched runs at one position."""
        return [(layer, position) for layer in pair.layers]

    groups = [
        Group(str(p), len(pair.layers), pair.clean_before, partial(_cells, pair, site, indices(p)), indices(p))
        for p in pair.positions
    ]
    return grid_of_pair(pair, "prefix", site, ["layer", "position"], groups)


def _cells(
    pair: PatchedPair, site: str, indices: Sequence[Index], answer_begins: tuple[int, ...]
) -> Mapping[Index, PatchingCell]:
    """Returns a dict of the PatchingCells (descriptions of patched runs) of prefix patching, by index (layer,
    position). answer_begins: tokens of an answer that follow both prompts."""
    runs, last = (pair.clean_before(answer_begins), pair.corrupt_before(answer_begins)), len(pair.runs[0].token_ids) - 1
    return {(layer, position): prefix_cell(*runs, site, layer, position, last) for layer, position in indices}


def prefix_cell(clean: Run, corrupt: Run, site: str, layer: int, position: int, last: int) -> PatchingCell:
    """Returns a PatchingCell (description of a patched run): at one layer, with clean states up to and at `position`,
    and corrupted states after it. last: the prompt's last position, which predicts the answer.

    If no position is after `position`, the cell has no edits, and the positions from the first different token on are
    recomputed from clean states.
    """
    rest = tuple(range(position + 1, len(clean.token_ids)))
    if not rest:
        return PatchingCell((), clean.begins_like(corrupt.token_ids), (site, layer))
    return PatchingCell(
        (Edit((site, layer), rest, corrupt.at(site, layer)[position + 1 :]),), min(position + 1, last), (site, layer)
    )
