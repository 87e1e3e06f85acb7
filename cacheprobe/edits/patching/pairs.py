"""Runs activation patching and prefix patching: puts states of the clean run into the corrupted run."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Unpack

import torch

from cacheprobe.core.hook_names import RECURRENT
from cacheprobe.core.tokens import visible
from cacheprobe.core.values import require_one_of
from cacheprobe.edits.patching.arguments import (
    RESIDUAL_SITES,
    Answer,
    GridConfig,
    GridOptions,
    as_answer,
    as_layers,
    as_pair,
    as_positions,
    patched_place,
    require_room,
)
from cacheprobe.edits.patching.cells import AnswerPair, Edit, PatchingCell, Run, cell, extend, run_once
from cacheprobe.edits.patching.grid import PatchingGrid, as_stored, difference, pair_meta, pair_table
from cacheprobe.edits.patching.sweep import CellStore, Group, Index, sweep, unpatched
from cacheprobe.models.base import CachedLM
from cacheprobe.models.experts import state_shapes
from cacheprobe.models.paths import usable
from cacheprobe.models.prompts import Prompt

_LEAST_DIFFERENCE = 1e-4
"""Minimum gap between the logit differences of the clean and the corrupted run. nld divides by the gap that a pair
has."""


class PatchedPair:
    """Holds the checked arguments of a patching grid, and the runs of its two prompts without patches."""

    @torch.inference_mode()
    def __init__(
        self,
        model: CachedLM,
        clean: Prompt,
        corrupt: Prompt,
        answer: "Sequence[Answer] | None",
        sites: Sequence[str],
        options: GridOptions,
    ) -> None:
        """Runs both prompts, and keeps states of S and of `sites`. Raises: as `activation`."""
        self.config = GridConfig(**options)
        self.model = usable(model, self.config.path)
        ids = as_pair(self.model, clean, corrupt)
        self.layers = as_layers(self.config.layers, self.model, sites)
        self.positions = as_positions(self.config.positions, len(ids[0]))
        self.runs = run_pair(self.model, *ids, sites)
        """The clean run, the corrupted run."""
        self.answer = answers(self.model, answer, *self.runs)
        """Token ids of the two answers."""
        self.clean_before, self.corrupt_before = (cache(partial(extend, self.model, run)) for run in self.runs)
        """Return the clean or the corrupted run, followed by the tokens with which an answer begins."""


def run_pair(
    model: CachedLM, clean: tuple[int, ...], corrupt: tuple[int, ...], sites: Iterable[str]
) -> tuple[Run, Run]:
    """Runs the clean and the corrupted prompt without patches, and returns (clean Run, corrupted Run).

    Positions before the first different token are computed once and copied, so they have the same bits in both runs.
    The positions from that token on are computed in one shape.
    """
    whole = run_once(model, corrupt, sites)
    shared = (whole, whole.begins_like(clean))
    return run_once(model, clean, sites, after=shared), run_once(model, corrupt, sites, after=shared)


def answers(model: CachedLM, answer: "Sequence[Answer] | None", clean: Run, corrupt: Run) -> AnswerPair:
    """Returns the token ids of the two answers that a grid compares; by default the first choices of the two runs.

    Raises: ValueError unless `answer` is two answers with the same tokens after both prompts, if `answer` is None and
    the two runs have the same first choice, if the model's context is too short, or if the runs' differences between
    the answers differ by less than 1e-4.
    """
    if answer is None:
        answer = [int(run.logits.argmax()) for run in (clean, corrupt)]
        if answer[0] == answer[1]:
            (text,) = model.token_texts(answer[:1])
            raise ValueError(f"both prompts go on with {text!r}, so there is nothing to bring over; give answer=(a, b)")
    if isinstance(answer, str) or len(pair := tuple(answer)) != 2:
        raise ValueError(f"answer must be two answers, the clean one and the other, got {answer!r}")
    found, other = ([as_answer(model, one, run.token_ids) for one in pair] for run in (clean, corrupt))
    if found != other:
        raise ValueError(
            f"the answers have the tokens {found} after the clean prompt, {other} after the other; give ids"
        )
    both = found[0], found[1]
    require_room(model, clean.token_ids, both)
    differences = [difference(unpatched(model, run, both)) for run in (clean, corrupt)]
    if not abs(differences[0] - differences[1]) >= _LEAST_DIFFERENCE:
        raise ValueError(
            f"both prompts put {differences[0]:.4f} between the answers {pair[0]!r} and {pair[1]!r}, so NLD has no "
            "scale; give an answer=(a, b) that the prompts differ in"
        )
    return both


def grid_of_pair(pair: PatchedPair, kind: str, site: str, axes: Sequence[str], groups: Sequence[Group]) -> PatchingGrid:
    """Computes the cells of a grid of a clean and a corrupted run, or reads finished ones; returns a PatchingGrid.

    axes: columns that index a cell, such as layer and position.
    """
    model, answer, (clean, corrupt) = pair.model, pair.answer, (run.token_ids for run in pair.runs)
    named = dict(answer=as_stored(answer), clean=clean, corrupt=corrupt)
    settings = dict(kind=kind, site=site, axes=axes, layers=pair.layers, **named, fingerprint=model.fingerprint())
    store = CellStore(pair.config.store, settings)
    results = dict(sorted(sweep(model, groups, answer, store, pair.config.progress).items()))
    ends = [unpatched(model, run, answer) for run in pair.runs]
    table = pair_table(results, axes, [visible(text) for text in model.token_texts(corrupt)], *ends)
    return PatchingGrid(table, pair_meta(model, kind, site, pair.runs, answer, ends))


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
    cells, from which the same call resumes; path, "plain", "bridge" or "auto", as in `cp.run`; progress.
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
    pair = PatchedPair(model, clean, corrupt, answer, (place,), options)

    shapes = state_shapes(pair.model) if place == RECURRENT else {}
    counts = {layer: shapes.get(layer, pair.model.head_shape)[0] for layer in pair.layers} if heads else {}

    def group(position: int) -> Group:
        """Returns the patched runs at one position, by (layer, position), or (layer, position, head)."""
        indices: list[Index] = [(layer, position) for layer in pair.layers]
        if heads:
            indices = [(*index, head) for index in indices for head in range(counts[index[0]])]
        cells = {index: _cell(pair.runs[0], place, *index) for index in indices}
        return Group(str(position), pair.corrupt_before, lambda begins: cells, indices)

    axes = ["layer", "position", *(["head"] if heads else [])]
    return grid_of_pair(pair, "activation", place, axes, [group(position) for position in pair.positions])


def _cell(donor: Run, site: str, layer: int, position: int, head: int | None = None) -> PatchingCell:
    """Returns the PatchingCell (description of a patched run) that copies one state of the run `donor`, of one head if
    given."""
    vectors = donor.at(site, layer)[position : position + 1]
    return cell([Edit((site, layer), (position,), vectors if head is None else vectors[:, head], head)])


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
    require_one_of("site", site, RESIDUAL_SITES)
    pair = PatchedPair(model, clean, corrupt, answer, (), options)
    last = len(pair.runs[0].token_ids) - 1

    def group(position: int) -> Group:
        """Returns the patched runs at one position, by (layer, position)."""
        indices: list[Index] = [(layer, position) for layer in pair.layers]

        def cells(begins: tuple[int, ...]) -> Mapping[Index, PatchingCell]:
            """Returns the cells by index. begins: tokens of an answer that follow both prompts."""
            runs = pair.clean_before(begins), pair.corrupt_before(begins)
            return {(layer, p): prefix_cell(*runs, site, layer, p, last) for layer, p in indices}

        return Group(str(position), pair.clean_before, cells, indices)

    return grid_of_pair(pair, "prefix", site, ["layer", "position"], [group(p) for p in pair.positions])


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
