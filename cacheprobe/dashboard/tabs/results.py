"""Shows stored result files: patching grids, cache surgery and probes as figures, sweeps as small multiples, others as
tables of numbers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.dashboard.figures import graphs
from cacheprobe.dashboard.questions import CannotShow, PageAnswer, PageQuestion, whole
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
_HOW_TO_GET_RESULTS = ("Name a folder of them: ", "cacheprobe dash RUN analyses/results")
KINDS = (
    ("patching", "Patching", "No patching grid was named", ("Keep one and name its file: ", 'grid.save("grid.json")')),
    ("surgery", "Cache surgery", "No result of cache surgery was named", _HOW_TO_GET_RESULTS),
    ("probes", "Probes", "No result of a probe was named", _HOW_TO_GET_RESULTS),
    (
        "sweep",
        "Sweep",
        "No sweep was named",
        ("Run one and name its folder: ", "cacheprobe sweep data/sweeps/coin-flip.yaml; cacheprobe dash runs/sweep"),
    ),
    ("results", "Results", "No other results were named", _HOW_TO_GET_RESULTS),
)
"""Each kind of result: its key, the name of its tab, the text without a result, and how to get one."""
_PROBE = {"at", "place", "site", "layer", "accuracy", "low", "high", "is_above", "untrained", "embedding", "majority"}
_SURGERY = {"people", "unit", "where", "treatment", "n", "total", "flips"}


def kind_of(path: Path) -> str:
    """Returns the kind of a result file by its content: "patching", "sweep", "surgery", "probes" or "results". An
    unreadable file is of the kind "results", whose tab shows the error."""
    try:
        content = _loaded(path)
    except (CannotShow, OSError):
        return "results"
    if _is_grid(content):
        return "patching"
    if is_sweep(content):
        return "sweep"
    if _lists_with(content, _SURGERY):
        return "surgery"
    return "probes" if _lists_with(content, _PROBE) else "results"


def view(shelf: Shelf, question: PageQuestion) -> str | PageAnswer:
    """Returns the figures of a result file with a note as a dict for the page; for a file without figures, HTML tables
    of its numbers."""
    path = shelf.results[whole(question["result"], "result", len(shelf.results))]
    content = _loaded(path)
    if is_sweep(content):
        return sweep_view(shelf, path.parent, question)
    figures, note = _figures(path, content)
    if not figures:
        return f"<h2>{markup(path.stem)}</h2>{_tables(content)}"
    html = f"<h2>{figures[0].layout.title.text}</h2><p class='note'>{note}</p>"
    return {"html": html, "graphs": graphs("result", figures, dark=question.get("theme") == "dark")}


def _loaded(path: Path) -> object:
    """Returns the content of a JSON file. Raises: CannotShow for a file that is too large or not JSON."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise CannotShow(f"{path.name} has {size} bytes, at most {MOST_BYTES} are shown")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CannotShow(f"{path.name} is not readable as JSON ({error!s:.120})") from error


def _figures(path: Path, content: object) -> tuple[Sequence[Figure], str]:
    """Returns (plotly figures, note on their source as escaped text) of a result file; ([], "") without figures."""
    if _is_grid(content):
        from cacheprobe.patching.grid import PatchingGrid

        grid = PatchingGrid.load(path)
        return [patching_grid(grid)], markup(repr(grid))
    if lists := _lists_with(content, _SURGERY):
        name, lines = lists[0]
        effects = pd.DataFrame(lines)
        note = (
            f"{name}, of {path.name}: normalised logit difference of the answer, 0 as it was, 1 as the other question"
        )
        return [coin_rows_figure(effects, unit=unit) for unit in effects.unit.unique()], markup(note)
    if lists := _lists_with(content, _PROBE):
        figures = [probe_figure(pd.DataFrame(lines)) for _, lines in lists[:MOST_FIGURES]]
        for figure, (name, _) in zip(figures, lists, strict=False):
            if len(lists) > 1:
                figure.update_layout(title_text=f"{markup(name.removesuffix(' · lines'))}: {figure.layout.title.text}")
        left_out = f" {len(lists) - len(figures)} more are not drawn." if len(lists) > len(figures) else ""
        return figures, markup(f"Of {path.name}.{left_out}")
    return [], ""


def _is_grid(content: object) -> bool:
    return isinstance(content, dict) and str(content.get("format", "")).startswith("cacheprobe patching grid")


def _lists_with(content: object, columns: set[str]) -> list[tuple[str, list[JsonDict]]]:
    """Returns a list of (path of keys, list of dicts): the lists in a JSON value in which every dict has these
    columns."""
    return [(name, lines) for name, lines in _record_lists(content) if all(columns <= set(line) for line in lines)]


def _record_lists(content: object, name: str = "") -> list[tuple[str, list[JsonDict]]]:
    """Returns a list of (path of keys joined by " · ", list of dicts): the lists of dicts in a JSON value that are
    reached through dicts alone."""
    if isinstance(content, dict):
        return [
            one for key, value in content.items() for one in _record_lists(value, f"{name} · {key}" if name else key)
        ]
    if isinstance(content, list) and content and all(isinstance(line, dict) for line in content):
        return [(name, content)]
    return []


def _tables(content: object) -> str:
    """Returns HTML tables of a JSON value: one with all values outside lists of records, and one for each list of
    records."""
    parts = []
    values = list(_plain_values(content))
    if values:
        parts.append(table(["figure", "value"], [[name, value] for name, value in values[:MOST_LINES]]))
    for name, lines in _record_lists(content):
        columns = list(dict.fromkeys(key for line in lines for key in line))
        cells = [["—" if line.get(c) is None else _cell(line[c]) for c in columns] for line in lines[:MOST_LINES]]
        how_many = f" (the first {MOST_LINES} of {len(lines)})" if len(lines) > MOST_LINES else ""
        parts.append(f"<h3>{markup(name or 'lines')}{how_many}</h3>{table(columns, cells)}")
    return "".join(parts) or "<p class='note'>This file holds nothing that can be shown as a table.</p>"


def _plain_values(content: object, name: str = "") -> list[tuple[str, object]]:
    """Returns a list of (path of keys, value): all values in a JSON value that are outside lists of records."""
    if isinstance(content, dict):
        return [
            one for key, value in content.items() for one in _plain_values(value, f"{name} · {key}" if name else key)
        ]
    if isinstance(content, list):
        is_records = bool(content) and all(isinstance(line, dict) for line in content)
        return [] if is_records else [(name, _cell(content))]
    return [(name, "—" if content is None else content)]


def _cell(value: object) -> object:
    return value if isinstance(value, int | float | str) else shorten(json.dumps(value, ensure_ascii=False), 120)
