"""Runs the cells of a patching grid group by group, with a progress bar; reads the groups that a CellStore has from
disk."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cacheprobe.core.progress import Progress
from cacheprobe.models.base import CachedLM
from cacheprobe.patching.cells import PatchingCell, is_idle, run_cells
from cacheprobe.patching.parts import CellStore
from cacheprobe.patching.runs import AnswerLogits, Run, read

Index = tuple[int, ...]
"""The index of a cell in the table, such as (layer, position)."""
CellProgress = Callable[[int, int], None]
"""Function that is called with (number of finished cells, number of all cells) after each group."""


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
    model: CachedLM,
    groups: Sequence[Group],
    answer: tuple[int, int],
    store: CellStore,
    progress: "bool | CellProgress",
    choose: Callable[[Tensor], int] | None = None,
) -> dict[Index, AnswerLogits]:
    """Runs the cells of a patching grid, or reads finished groups from `store`; returns a dict of AnswerLogits by
    index.

    A cell with edits that change no value takes the unpatched run's result.
    answer: the two answer tokens whose logits are measured.
    progress: whether to draw a bar; or a function that is called after each group, instead of a bar.
    choose: a function that returns a token id for logits [v]; it becomes `top` of a cell in place of the likeliest
    token.
    """
    out: dict[Index, AnswerLogits] = {}
    with Progress(sum(group.count for group in groups), "patching", "cells", enabled=progress is True) as bar:
        for group in groups:
            results = store.get(group.name)
            if results is None:
                results = _run_group(model, group, answer, choose)
                store.put(group.name, results)
            out |= dict(zip(group.indices, results, strict=True))
            bar.advance(group.count)
            if callable(progress):
                progress(bar.done, bar.total)
    return out


def _run_group(
    model: CachedLM, group: Group, answer: tuple[int, int], choose: Callable[[Tensor], int] | None
) -> list[AnswerLogits]:
    """Runs one group of patched runs, and returns a list of their AnswerLogits in the order of `group.indices`."""

    def answers_of(logits: Tensor) -> list[AnswerLogits]:
        """Returns a list of AnswerLogits for logits [b, v], whose `top` is chosen by `choose` if given."""
        found = read(logits, answer)
        if choose is None:
            return found
        return [one._replace(top=choose(row)) for one, row in zip(found, logits, strict=True)]

    base, cells = group.base(), group.cells()
    results = dict.fromkeys(group.indices, answers_of(base.logits[None])[0])
    active = [index for index in group.indices if not is_idle(cells[index], base)]
    if active:
        logits = run_cells(model, base, [cells[index] for index in active])
        results |= dict(zip(active, answers_of(logits), strict=True))
    return [results[index] for index in group.indices]
