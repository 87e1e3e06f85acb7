"""Runs the cells of a patching grid group by group, with a progress bar; stores finished groups on disk, so that the
grid can resume."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from cacheprobe.core.files import write_json
from cacheprobe.core.terminal import Progress
from cacheprobe.core.values import folder as checked_folder
from cacheprobe.edits.patching.cells import (
    AnswerLogits,
    AnswerPair,
    PatchingCell,
    Run,
    extend,
    is_idle,
    read,
    read_whole,
    run_cells,
    run_cells_to_end,
)
from cacheprobe.models.base import CachedLM

_SETTINGS_FILE = "asked.json"


class CellStore:
    """Stores results of a patching grid in a folder, so that the grid can resume; without a folder, stores no file."""

    def __init__(self, folder: "str | Path | None", settings: Mapping[str, object]) -> None:
        """Opens or creates the folder of a grid's results; does nothing if `folder` is None. settings: everything that
        the results depend on.

        Raises: ValueError for a folder that contains results of another grid, or files but no settings of a grid.
        """
        self.folder = None if folder is None else checked_folder("store", folder)
        if self.folder is None:
            return
        requested = json.loads(json.dumps(settings))
        path = self.folder / _SETTINGS_FILE
        if path.exists():
            stored = _read(path)
            if differing := [name for name in {**stored, **requested} if stored.get(name) != requested.get(name)]:
                name = differing[0]
                raise ValueError(
                    f"{self.folder} holds the cells of another grid: {name} is {stored.get(name)!r:.80} there and "
                    f"{requested.get(name)!r:.80} here; give another store=, or remove the folder"
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise ValueError(f"{self.folder} is not empty and holds no cells of a grid; give another store=")
        else:
            write_json(path, requested, indent=None)

    def get(self, name: str) -> list[AnswerLogits] | None:
        """Returns the stored results of a group of patched runs, as a list of AnswerLogits. Returns None if there is no
        folder, or no file of the group in the folder."""
        if self.folder is None or not (path := self._path(name)).exists():
            return None
        return [AnswerLogits(float(a), float(b), float(c), int(d)) for a, b, c, d in _read(path)]

    def put(self, name: str, results: Sequence[AnswerLogits]) -> None:
        """Writes the results of a group of patched runs to the folder, if there is one."""
        if self.folder is not None:
            write_json(self._path(name), [list(one) for one in results], indent=None)

    def _path(self, name: str) -> Path:
        """Returns the path of the JSON file with the results of a group."""
        assert self.folder is not None
        return self.folder / f"cells-{name}.json"


def _read(path: Path):
    """Returns the content of a JSON file of a CellStore. Raises: ValueError if the file is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no file of a grid ({error!s:.80}); remove it and run again") from error


Index = tuple[int, ...]
"""The index of a cell in the table, such as (layer, position)."""
CellProgress = Callable[[int, int], None]
"""Function that is called with (number of finished cells, number of all cells) after each group."""


@dataclass(frozen=True)
class Group:
    """Describes a group of patched runs (cells) of one grid that are run and stored together."""

    name: str
    base: Callable[[tuple[int, ...]], Run]
    """Returns the unpatched run that the cells change, followed by the given tokens, which are the beginning of an
    answer; called only if the group must run."""
    cells: Callable[[tuple[int, ...]], Mapping[Index, PatchingCell]]
    """Returns the cells by index, for that run; called only if the group must run."""
    indices: Sequence[Index]


def sweep(
    model: CachedLM,
    groups: Sequence[Group],
    answers: AnswerPair,
    store: CellStore,
    progress: "bool | CellProgress",
    choose: Callable[[Tensor], int] | None = None,
) -> dict[Index, AnswerLogits]:
    """Runs the cells of a patching grid, or reads finished groups from `store`; returns a dict of AnswerLogits by
    index.

    A cell with edits that change no value takes the unpatched run's result.
    answers: the two answers that are measured.
    progress: whether to draw a bar; or a function that is called after each group, instead of a bar.
    choose: a function that returns a token id for logits [v]; it becomes `top` of a cell in place of the likeliest
    token. The answers then have one token each.
    """
    out: dict[Index, AnswerLogits] = {}
    with Progress(sum(len(group.indices) for group in groups), "patching", "cells", enabled=progress is True) as bar:
        for group in groups:
            results = store.get(group.name)
            if results is None:
                results = _run_group(model, group, answers, choose)
                store.put(group.name, results)
            out |= dict(zip(group.indices, results, strict=True))
            bar.advance(len(group.indices))
            if callable(progress):
                progress(bar.done, bar.total)
    return out


def _run_group(
    model: CachedLM, group: Group, answers: AnswerPair, choose: Callable[[Tensor], int] | None
) -> list[AnswerLogits]:
    """Runs one group of patched runs, and returns a list of their AnswerLogits in the order of `group.indices`."""

    def answers_of(logits: Tensor, tokens: tuple[int, int]) -> list[AnswerLogits]:
        """Returns a list of AnswerLogits for logits [b, v], whose `top` is chosen by `choose` if given."""
        found = read(logits, tokens)
        if choose is None:
            return found
        return [one._replace(top=choose(row)) for one, row in zip(found, logits, strict=True)]

    base, cells, tokens = group.base(()), group.cells(()), as_tokens(answers)
    unchanged = unpatched(model, base, answers) if tokens is None else answers_of(base.logits[None], tokens)[0]
    results = dict.fromkeys(group.indices, unchanged)
    active = [index for index in group.indices if not is_idle(cells[index], base)]
    if active and tokens is not None:
        logits = run_cells(model, base, [cells[index] for index in active])
        results |= dict(zip(active, answers_of(logits, tokens), strict=True))
    elif active:
        found = _whole(model, group.base, lambda begins: [group.cells(begins)[index] for index in active], answers)
        results |= dict(zip(active, found, strict=True))
    return [results[index] for index in group.indices]


def unpatched(model: CachedLM, run: Run, answers: AnswerPair) -> AnswerLogits:
    """Returns the AnswerLogits of a run without patches."""
    if (tokens := as_tokens(answers)) is not None:
        return read(run.logits[None], tokens)[0]
    cell = PatchingCell((), len(run.token_ids) - 1, ("pre", 0))
    return _whole(model, lambda begins: extend(model, run, begins), lambda begins: [cell], answers)[0]


def as_tokens(answers: AnswerPair) -> tuple[int, int] | None:
    """Returns the token ids of two answers of one token each; None if one has more."""
    return (answers[0][0], answers[1][0]) if len(answers[0]) == len(answers[1]) == 1 else None


def _whole(
    model: CachedLM,
    base: Callable[[tuple[int, ...]], Run],
    cells: Callable[[tuple[int, ...]], Sequence[PatchingCell]],
    answers: AnswerPair,
) -> list[AnswerLogits]:
    """Returns a list of AnswerLogits, one for each cell, of answers of any length. base, cells: as in `Group`; they are
    called with all but the last token of each answer."""
    first, second = (run_cells_to_end(model, base(ids[:-1]), cells(ids[:-1]), len(ids)) for ids in answers)
    return read_whole((first, second), answers)
