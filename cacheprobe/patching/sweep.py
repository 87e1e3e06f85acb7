"""Runs groups of cells one after another, with a progress bar; finished groups are read from the disk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cacheprobe.core.progress import Progress
from cacheprobe.models.base import CachedLM
from cacheprobe.patching.cells import Cell, is_idle, run_cells
from cacheprobe.patching.parts import Parts
from cacheprobe.patching.runs import AnswerLogits, Run, read

Index = tuple[int, ...]
"""The index of a cell in the table, such as (layer, position)."""


@dataclass(frozen=True)
class Group:
    """Cells that share a first position, created when they are needed."""

    name: str
    count: int
    """Number of cells."""
    base: Callable[[], Run]
    cells: Callable[[], Mapping[Index, Cell]]
    indices: Sequence[Index]


def sweep(
    model: CachedLM, groups: Sequence[Group], answer: tuple[int, int], parts: Parts, progress: bool
) -> dict[Index, AnswerLogits]:
    """Returns the result of every cell by index. A cell whose edits change no bit takes the unpatched run's result."""
    out: dict[Index, AnswerLogits] = {}
    with Progress(sum(group.count for group in groups), "patching", "cells", enabled=progress) as bar:
        for group in groups:
            results = parts.get(group.name)
            if results is None:
                results = _run_group(model, group, answer)
                parts.put(group.name, results)
            out |= dict(zip(group.indices, results, strict=True))
            bar.advance(group.count)
    return out


def _run_group(model: CachedLM, group: Group, answer: tuple[int, int]) -> list[AnswerLogits]:
    base, cells = group.base(), group.cells()
    (unpatched,) = read(base.logits[None], answer)
    results = dict.fromkeys(group.indices, unpatched)
    active = [index for index in group.indices if not is_idle(cells[index], base)]
    if active:
        logits = run_cells(model, base, [cells[index] for index in active])
        results |= dict(zip(active, read(logits, answer), strict=True))
    return [results[index] for index in group.indices]
