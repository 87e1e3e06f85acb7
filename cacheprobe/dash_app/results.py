"""Stored results: patching grids and probes as their figures, everything else as a table of its numbers."""

import json
from typing import Any

import pandas as pd

from cacheprobe.dash_app.asking import Ask, NotAsked, whole
from cacheprobe.dash_app.shelf import Shelf
from cacheprobe.views.page import table
from cacheprobe.views.patching import patching_grid
from cacheprobe.views.probes import probe_figure
from cacheprobe.views.style import layout_template
from cacheprobe.views.text import markup

MOST_BYTES = 20 * 2**20
MOST_LINES = 200
_PROBE = {"at", "place", "site", "layer", "accuracy", "low", "high", "is_above", "untrained", "embedding", "majority"}


def view(shelf: Shelf, ask: Ask) -> tuple[Any, dict[str, Any]]:
    """The figure of a result, or None where it has none, and what is said of it."""
    path = shelf.results[whole(ask["result"], "result", len(shelf.results))]
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise NotAsked(f"{path.name} has {size} bytes, at most {MOST_BYTES} are shown")
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise NotAsked(f"{path.name} is not readable as JSON ({error})") from error
    figure, title, note = _figure(path, held)
    if figure is None:
        return None, {"title": markup(path.stem), "note": "", "html": _tables(held)}
    figure.update_layout(template=layout_template(dark=ask.get("theme") == "dark"), title=None)
    return figure, {"title": title, "note": note, "html": ""}


def _figure(path: Any, held: Any) -> tuple[Any, str, str]:
    if isinstance(held, dict) and str(held.get("format", "")).startswith("cacheprobe patching grid"):
        from cacheprobe.patching.grid import Grid

        grid = Grid.load(path)
        figure = patching_grid(grid)
        return figure, figure.layout.title.text, markup(repr(grid))
    found = [(name, lines) for name, lines in _lists(held) if lines and _PROBE <= set(lines[0])]
    if found:
        name, lines = found[0]
        figure = probe_figure(pd.DataFrame(lines))
        more = f" {len(found) - 1} more of {path.name} are not drawn." if len(found) > 1 else ""
        return figure, markup(figure.layout.title.text), markup(f"{name}, of {path.name}.{more}")
    return None, "", ""


def _lists(held: Any, name: str = "") -> list[tuple[str, list[dict[str, Any]]]]:
    """Every list of records in a result, with the names that lead to it."""
    if isinstance(held, dict):
        return [one for key, value in held.items() for one in _lists(value, f"{name} · {key}" if name else key)]
    is_records = isinstance(held, list) and held and all(isinstance(line, dict) for line in held)
    return [(name, held)] if is_records else []


def _tables(held: Any) -> str:
    """Plain numbers first, then each list of records."""
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


def _plain(held: Any, name: str = "") -> list[tuple[str, object]]:
    if isinstance(held, dict):
        return [one for key, value in held.items() for one in _plain(value, f"{name} · {key}" if name else key)]
    if isinstance(held, list):
        is_records = bool(held) and all(isinstance(line, dict) for line in held)
        return [] if is_records else [(name, _cell(held))]
    return [(name, "—" if held is None else held)]


def _cell(value: Any) -> object:
    return value if isinstance(value, int | float | str) else json.dumps(value, ensure_ascii=False)[:120]
