"""Runs the cells of a patching grid group by group, with a progress bar; reads the groups that a CellStore has from
disk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cacheprobe.core.progress import Progress
from cacheprobe.models.base import CachedLM
from cacheprobe.patching.cells import PatchingCell, is_idle, run_cells
from cacheprobe.patching.parts import CellStore
from cacheprobe.patching.runs import AnswerLogits, Run, read

Index = tuple[int, ...]
"""The index of a cell in the table, such as (layer, position)."""


@dataclass(frozen=True)
class Group:
    """Describes a group of patched runs (cells) of one grid that are run and stored together."""

    name: str
    count: int
    """Number of cells."""
    base: Callable[[], Run]
    """Returns the unpatched run that the cells change; called only if the group must run."""
    cells: Callable[[], Mapping[Index, PatchingCell]]
    """Returns the cells by index; called only if the group must run."""
    indices: Sequence[Index]


def sweep(
    model: CachedLM, groups: Sequence[Group], answer: tuple[int, int], store: CellStore, progress: bool
) -> dict[Index, AnswerLogits]:
    """Runs the cells of a patching grid, or reads finished groups from `store`; returns a dict of AnswerLogits by
    index.

    A cell with edits that change no value takes the unpatched run's result.
    answer: the two answer tokens whose logits are measured.
    """
    out: dict[Index, AnswerLogits] = {}
    with Progress(sum(group.count for group in groups), "patching", "cells", enabled=progress) as bar:
        for group in groups:
            results = store.get(group.name)
            if results is None:
                results = _run_group(model, group, answer)
                store.put(group.name, results)
            out |= dict(zip(group.indices, results, strict=True))
            bar.advance(group.count)
    return out


def _run_group(model: CachedLM, group: Group, answer: tuple[int, int]) -> list[AnswerLogits]:
    """Runs one group of patched runs, and returns a list of their AnswerLogits in the order of `group.indices`."""
    base, cells = group.base(), group.cells()
    (unpatched,) = read(base.logits[None], answer)
    results = dict.fromkeys(group.indices, unpatched)
    active = [index for index in group.indices if not is_idle(cells[index], base)]
    if active:
        logits = run_cells(model, base, [cells[index] for index in active])
        results |= dict(zip(active, read(logits, answer), strict=True))
    return [results[index] for index in group.indices]
