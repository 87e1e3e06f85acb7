"""Runs both prompts of a pair without patches, and finds the two answers to compare."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from cacheprobe.core.tokens import visible
from cacheprobe.edits.patching.answers import Answer, as_answer, require_room
from cacheprobe.edits.patching.arguments import (
    GridConfig,
    GridOptions,
    as_layers,
    as_pair,
    as_positions,
    grid_config,
    usable,
)
from cacheprobe.edits.patching.grid import PatchingGrid, as_stored, difference, pair_meta, pair_table
from cacheprobe.edits.patching.parts import CellStore
from cacheprobe.edits.patching.runs import AnswerPair, Run, extend, run_once
from cacheprobe.edits.patching.sweep import Group, sweep, unpatched
from cacheprobe.models.base import CachedLM
from cacheprobe.models.prompts import Prompt

_LEAST_DIFFERENCE = 1e-4
"""Minimum gap between the logit differences of the clean and the corrupted run. nld divides by the gap that a pair
has."""


@dataclass(frozen=True)
class PatchedPair:
    """Holds the checked arguments of a patching grid, and the runs of its two prompts without patches."""

    model: CachedLM
    config: GridConfig
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    runs: tuple[Run, Run]
    """The clean run, the corrupted run."""
    answer: AnswerPair
    """Token ids of the two answers."""
    clean_before: Callable[[tuple[int, ...]], Run] = field(init=False, repr=False)
    """Returns the clean run, followed by the tokens with which an answer begins."""
    corrupt_before: Callable[[tuple[int, ...]], Run] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, run in zip(("clean_before", "corrupt_before"), self.runs, strict=True):
            object.__setattr__(self, name, cache(lambda begins, run=run: extend(self.model, run, begins)))

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        model: CachedLM,
        clean: Prompt,
        corrupt: Prompt,
        answer: "Sequence[Answer] | None",
        sites: Iterable[str],
        options: GridOptions,
    ) -> "PatchedPair":
        """Returns the PatchedPair of a call; keeps states of S and of `sites`. Raises: as `activation`."""
        config = grid_config(**options)
        model = usable(model, config.path)
        ids = as_pair(model, clean, corrupt)
        sites = tuple(sites)
        layers, positions = as_layers(config.layers, model, sites), as_positions(config.positions, len(ids[0]))
        runs = run_pair(model, *ids, sites)
        return cls(model, config, layers, positions, runs, answers(model, answer, *runs))


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
    settings = dict(kind=kind, site=site, axes=axes, layers=pair.layers, **named)
    store = open_cell_store(pair.config.store, model, settings)
    results = dict(sorted(sweep(model, groups, answer, store, pair.config.progress).items()))
    ends = [unpatched(model, run, answer) for run in pair.runs]
    table = pair_table(results, axes, [visible(text) for text in model.token_texts(corrupt)], *ends)
    return PatchingGrid(table, pair_meta(model, kind, site, pair.runs, answer, ends))


def open_cell_store(store: "str | Path | None", model: CachedLM, settings: Mapping[str, object]) -> CellStore:
    """Opens the folder of a patching grid's finished results as a CellStore; if `store` is None, results are not kept.

    settings: of the grid; the model's fingerprint is added.
    Raises: ValueError if the folder contains cells of another grid, or files but no settings of a grid.
    """
    return CellStore(store, {} if store is None else {**settings, "fingerprint": model.fingerprint()})
