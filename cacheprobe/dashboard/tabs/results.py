"""Shows stored results: patching grids, cache surgery and probes as figures, others as tables of numbers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.dashboard.figures import graphs
from cacheprobe.dashboard.questions import Answer, CannotShow, Question, whole
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.dashboard.tabs.sweep import is_sweep, sweep_view
from cacheprobe.plots.coin_rows import coin_rows_figure
from cacheprobe.plots.patching import patching_grid
from cacheprobe.plots.probes import probe_figure
from cacheprobe.plots.report.page import table
from cacheprobe.plots.style import Figure
from cacheprobe.plots.text import markup, shorten

MOST_BYTES = 20 * 2**20
MOST_LINES = 200
MOST_FIGURES = 6
_REMEDY = ("Name a folder of them: ", "cacheprobe dash RUN analyses/results")
KINDS = (
    ("patching", "Patching", "No patching grid was named", ("Keep one and name its file: ", 'grid.save("grid.json")')),
    ("surgery", "Cache surgery", "No result of cache surgery was named", _REMEDY),
    ("probes", "Probes", "No result of a probe was named", _REMEDY),
    (
        "sweep",
        "Sweep",
        "No sweep was named",
        ("Run one and name its folder: ", "cacheprobe sweep data/sweeps/coin-flip.yaml; cacheprobe dash runs/sweep"),
    ),
    ("results", "Results", "No other results were named", _REMEDY),
)
"""Each kind of result: its key, the name of its tab, the text without one, and how to get one."""
_PROBE = {"at", "place", "site", "layer", "accuracy", "low", "high", "is_above", "untrained", "embedding", "majority"}
_SURGERY = {"people", "unit", "where", "treatment", "n", "total", "flips"}


def kind_of(path: Path) -> str:
    """Returns the tab of a result, by its content. An unreadable file gets the tab "results", which shows the error."""
    try:
        held = _held(path)
    except (CannotShow, OSError):
        return "results"
    if _is_grid(held):
        return "patching"
    if is_sweep(held):
        return "sweep"
    if _having(held, _SURGERY):
        return "surgery"
    return "probes" if _having(held, _PROBE) else "results"


def view(shelf: Shelf, question: Question) -> str | Answer:
    """Returns the figures of a result with a note, or its numbers as tables."""
    path = shelf.results[whole(question["result"], "result", len(shelf.results))]
    held = _held(path)
    if is_sweep(held):
        return sweep_view(shelf, path.parent, question)
    figures, note = _figures(path, held)
    if not figures:
        return f"<h2>{markup(path.stem)}</h2>{_tables(held)}"
    html = f"<h2>{figures[0].layout.title.text}</h2><p class='note'>{note}</p>"
    return {"html": html, "graphs": graphs("result", figures, dark=question.get("theme") == "dark")}


def _held(path: Path) -> object:
    """Returns the file's JSON. Raises: CannotShow for a large or unreadable file."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise CannotShow(f"{path.name} has {size} bytes, at most {MOST_BYTES} are shown")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CannotShow(f"{path.name} is not readable as JSON ({error!s:.120})") from error


def _figures(path: Path, held: object) -> tuple[Sequence[Figure], str]:
    """Returns figures, and a note on their source as markup; ([], "") if the result has no figure."""
    if _is_grid(held):
        from cacheprobe.patching.grid import Grid

        grid = Grid.load(path)
        return [patching_grid(grid)], markup(repr(grid))
    if found := _having(held, _SURGERY):
        name, lines = found[0]
        effects = pd.DataFrame(lines)
        note = (
            f"{name}, of {path.name}: normalised logit difference of the answer, 0 as it was, 1 as the other question"
        )
        return [coin_rows_figure(effects, unit=unit) for unit in effects.unit.unique()], markup(note)
    if found := _having(held, _PROBE):
        figures = [probe_figure(pd.DataFrame(lines)) for _, lines in found[:MOST_FIGURES]]
        for figure, (name, _) in zip(figures, found, strict=False):
            if len(found) > 1:
                figure.update_layout(title_text=f"{markup(name.removesuffix(' · lines'))}: {figure.layout.title.text}")
        more = f" {len(found) - len(figures)} more are not drawn." if len(found) > len(figures) else ""
        return figures, markup(f"Of {path.name}.{more}")
    return [], ""


def _is_grid(held: object) -> bool:
    return isinstance(held, dict) and str(held.get("format", "")).startswith("cacheprobe patching grid")


def _having(held: object, columns: set[str]) -> list[tuple[str, list[JsonDict]]]:
    """Returns the lists of records that have these columns."""
    return [(name, lines) for name, lines in _lists(held) if all(columns <= set(line) for line in lines)]


def _lists(held: object, name: str = "") -> list[tuple[str, list[JsonDict]]]:
    """Returns every list of records in a result, with the path of names to it."""
    if isinstance(held, dict):
        return [one for key, value in held.items() for one in _lists(value, f"{name} · {key}" if name else key)]
    if isinstance(held, list) and held and all(isinstance(line, dict) for line in held):
        return [(name, held)]
    return []


def _tables(held: object) -> str:
    """Returns plain numbers as one table, then each list of records as a table."""
    parts = []
    plain = list(_plain(held))
    if plain:
        parts.append(table(["figure", "value"], [[name, value] for name, value in plain[:MOST_LINES]]))
    for name, lines in _lists(held):
        columns = list(dict.fromkeys(key for line in lines for key in line))
        shown = [["—" if line.get(c) is None else _cell(line[c]) for c in columns] for line in lines[:MOST_LINES]]
        cut = f" (the first {MOST_LINES} of {len(lines)})" if len(lines) > MOST_LINES else ""
        parts.append(f"<h3>{markup(name or 'lines')}{cut}</h3>{table(columns, shown)}")
    return "".join(parts) or "<p class='note'>This file holds nothing that can be shown as a table.</p>"


def _plain(held: object, name: str = "") -> list[tuple[str, object]]:
    if isinstance(held, dict):
        return [one for key, value in held.items() for one in _plain(value, f"{name} · {key}" if name else key)]
    if isinstance(held, list):
        is_records = bool(held) and all(isinstance(line, dict) for line in held)
        return [] if is_records else [(name, _cell(held))]
    return [(name, "—" if held is None else held)]


def _cell(value: object) -> object:
    return value if isinstance(value, int | float | str) else shorten(json.dumps(value, ensure_ascii=False), 120)
