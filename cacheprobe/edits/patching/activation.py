"""Runs activation patching: puts one state of the clean run at a time into the corrupted run."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Unpack

import torch

from cacheprobe.core.hook_names import RECURRENT
from cacheprobe.edits.patching.answers import Answer
from cacheprobe.edits.patching.arguments import GridOptions, patched_place
from cacheprobe.edits.patching.cells import Edit, PatchingCell, cell
from cacheprobe.edits.patching.grid import PatchingGrid
from cacheprobe.edits.patching.pair import PatchedPair, grid_of_pair
from cacheprobe.edits.patching.runs import Run
from cacheprobe.edits.patching.sweep import Group, Index
from cacheprobe.models.base import CachedLM
from cacheprobe.models.experts.sites import state_shapes
from cacheprobe.models.prompts import Prompt


@torch.inference_mode()
def activation(
    model: CachedLM,
    clean: Prompt,
    corrupt: Prompt,
    *,
    site: str = "S",
    heads: bool = False,
    answer: "Sequence[Answer] | None" = None,
    **options: Unpack[GridOptions],
) -> PatchingGrid:
    """Computes activation patching: for each layer and position, the corrupted prompt is run with the clean run's state
    of that layer and position. Returns a PatchingGrid.

    The table gives, for each of these runs, the logit difference between two answers.
    clean, corrupt: prompts of one length: text, token ids or task examples.
    site: S, T, C, "pre", the residual stream that enters the block, or "recurrent", the state of a recurrent layer
    after the token, which later tokens go on from.  heads: one run for each head: at site T its output (site z) is
    patched, at site recurrent its part of the state.
    answer: the clean answer and the other one, each as text that follows the prompt, a token id, or the ids of several
    tokens; by default the first choices of the two runs. An answer of several tokens is scored whole: its
    log-probability, the sum over its tokens, takes the place of the logit.
    options, the keywords of GridOptions: layers and positions of the grid, None for all; store, a folder for finished
    cells, from which the same call resumes; path, "fast", "bridge" or "auto", as in `cp.run`; progress.
    The PatchingGrid's table has layer, position, head (if requested), token, logit_difference, nld (normalised logit
    difference), flip, logprob_nats.
    Raises: ValueError for prompts of different length, equal prompts, an unknown site, layer or position, heads at
    another site, and answers between which the two runs have about the same logit difference; ModelError for a
    model without `editing`, or with more memory than keys, values and recurrent states.
    Source: a component set to its value under another prompt, Vig et al. 2020 (arXiv 2004.12265), whose components are
    neurons and heads; a grid of positions and layers as in Meng et al. 2022 (arXiv 2202.05262), section 2.1.
    Twin: tests.twins.patching_slowly.naive_grid: one plain forward for each cell, close(1e-5) in float32.
    """
    place = patched_place(site, heads)
    pair = PatchedPair.of(model, clean, corrupt, answer, (place,), options)
    runs = pair.runs

    counts = {layer: _num_heads(pair.model, place, layer) if heads else 1 for layer in pair.layers}

    def indices(position: int) -> list[Index]:
        """Returns a list of the indices of the patched runs at one position: (layer, position), or (layer, position,
        head)."""
        return [
            (layer, position, *((head,) if heads else ())) for layer in pair.layers for head in range(counts[layer])
        ]

    groups = [
        Group(str(p), len(indices(p)), pair.corrupt_before, partial(_cells, runs[0], place, indices(p)), indices(p))
        for p in pair.positions
    ]
    axes = ["layer", "position", *(["head"] if heads else [])]
    return grid_of_pair(pair, "activation", place, axes, groups)


def _num_heads(model: CachedLM, place: str, layer: int) -> int:
    """Returns the number of heads at a site and layer."""
    return state_shapes(model)[layer][0] if place == RECURRENT else model.head_shape[0]


def _cells(donor: Run, site: str, indices: list[Index], answer_begins: tuple[int, ...]) -> Mapping[Index, PatchingCell]:
    """Returns a dict of PatchingCells by index: descriptions of patched runs that each copy one state of the run
    `donor`."""
    return {index: _cell(donor, site, *index) for index in indices}


def _cell(donor: Run, site: str, layer: int, position: int, head: int | None = None) -> PatchingCell:
    """Returns the PatchingCell (description of a patched run) that copies one state of the run `donor`, of one head if
    given."""
    vectors = donor.at(site, layer)[position : position + 1]
    return cell([Edit((site, layer), (position,), vectors if head is None else vectors[:, head], head)])
