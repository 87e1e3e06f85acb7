"""Shows a sweep: small multiples over any two of its axes, and its cells, each with a button that opens its run."""

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path

import pandas as pd

from cacheprobe.dashboard.figures import graphs
from cacheprobe.dashboard.questions import CannotShow, PageAnswer, PageQuestion
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.plots.sweep_grid import MOST, NONE, in_order, sweep_grid
from cacheprobe.plots.text import markup

MOST_LINES = 200


def is_sweep(content: object) -> bool:
    """Returns True if the content of a result file is the plan of a sweep."""
    return isinstance(content, dict) and content.get("format") == "cacheprobe sweep"


def sweep_view(shelf: Shelf, folder: Path, question: PageQuestion) -> str | PageAnswer:
    """Returns a dict for the page: the small multiples of a sweep over two axes, buttons for other axes, and a table of
    the cells. Without two axes that differ, or without readings, returns HTML with the table alone.

    question["facet"]: "ROWS.COLUMNS", two axes that differ among the cells; by default the first two. For an axis with
    too many values, pages of them: "ROWS.COLUMNS.2.0" is the third page of ROWS.
    """
    from cacheprobe.sweeps.index import AXIS_COLUMNS
    from cacheprobe.sweeps.results import load_sweep

    results = load_sweep(folder)
    cells, layers = results.cells, results.layers
    varied = {name: in_order(_axis_values(cells, name).unique()) for name in AXIS_COLUMNS}
    varied = {name: values for name, values in varied.items() if len(values) > 1}
    about = f"{len(cells)} cells of the sweep {folder.name}"
    about += f", {len(results.pending)} more are planned" if results.pending else ""
    about += f"; {results.num_others} of other plans or versions are left out" if results.num_others else ""
    note = f"<p class='note'>{markup(about)}. A cell's button opens its run.</p>"
    if len(varied) < 2 or layers.empty:
        has_axes = len(varied) > 1
        reason = "No cell kept readings (run.capture: Z)" if has_axes else "Fewer than two axes have several values"
        return f"<h2>{reason}, so there is nothing to put side by side</h2>{note}{_cells_table(shelf, cells, cells)}"
    pairs = [f"{a}.{b}" for a, b in permutations(varied, 2)]
    pair, pages = _parse_facet(question.get("facet", pairs[0]), pairs, varied)
    cells_drawn = cells
    for name, page in pages.items():
        values = varied[name][page * MOST : (page + 1) * MOST]
        cells_drawn, layers = (table[_axis_values(table, name).isin(values)] for table in (cells_drawn, layers))
    figure = sweep_grid(layers, *pages)
    html = f"<h2>{figure.layout.title.text}</h2>{note}{_pair_buttons(pairs, pair)}{_page_buttons(pair, pages, varied)}"
    figure_json = graphs("result", [figure], dark=question.get("theme") == "dark")
    return {"html": html, "graphs": figure_json, "more": _cells_table(shelf, cells_drawn, cells)}


def _axis_values(table: pd.DataFrame, axis: str) -> pd.Series:
    """Returns the values of an axis as a Series, with the text "none" for missing values."""
    return table[axis].astype(object).where(table[axis].notna(), NONE)


def _parse_facet(facet: object, pairs: list[str], varied: Mapping[str, Sequence[object]]) -> tuple[str, dict[str, int]]:
    """Returns (pair of axes as "ROWS.COLUMNS", dict from axis to number of its page) from a text such as
    "ROWS.COLUMNS.2.0". Raises: CannotShow for an unknown pair or page."""
    parts = str(facet).split(".")
    axes, numbers = parts[:2], parts[2:] or ["0", "0"]
    pair = ".".join(axes)
    if pair not in pairs or len(numbers) != 2:
        raise CannotShow(f"there is no facet {facet!r:.60}; there are {', '.join(pairs)}")
    pages = {}
    for name, number in zip(axes, numbers, strict=True):
        last_page = (len(varied[name]) - 1) // MOST
        if not (number.isascii() and number.isdecimal()) or len(number) > 9 or int(number) > last_page:
            raise CannotShow(f"there is no stretch {number!r:.20} of {name}; there are 0 to {last_page}")
        pages[name] = int(number)
    return pair, pages


def _page_buttons(pair: str, pages: dict[str, int], varied: Mapping[str, Sequence[object]]) -> str:
    """Returns HTML: for each axis with more values than are drawn at once, a button for each page of values."""
    lines = []
    for name in (name for name in pages if len(varied[name]) > MOST):
        buttons = []
        for page in range(-(-len(varied[name]) // MOST)):
            values = varied[name][page * MOST : (page + 1) * MOST]
            facet = ".".join([pair, *(str(axis_page) for axis_page in {**pages, name: page}.values())])
            label = f"{values[0]} to {values[-1]}" if len(values) > 1 else str(values[0])
            buttons.append(_button(facet, label, page == pages[name]))
        lines.append(f'<div class="verdicts">{markup(name)}: {"".join(buttons)}</div>')
    return "".join(lines)


def _pair_buttons(pairs: list[str], chosen: str) -> str:
    """Returns HTML with a button for each pair of axes; the first axis of a pair goes downwards."""
    buttons = (_button(pair, " × ".join(pair.split(".")), pair == chosen) for pair in pairs)
    return f'<div class="verdicts">{"".join(buttons)}</div>'


def _button(facet: str, label: str, is_chosen: bool) -> str:
    return (
        f'<button class="plain{" chosen" if is_chosen else ""}" data-intent="set" data-name="facet" '
        f'data-value="{markup(facet)}">{markup(label)}</button>'
    )


def _cells_table(shelf: Shelf, cells: pd.DataFrame, all_cells: pd.DataFrame) -> str:
    """Returns an HTML table of the first 200 of these cells: a button that opens the cell's run, the axes that differ
    among all cells, and results."""
    from cacheprobe.sweeps.index import AXIS_COLUMNS

    runs = shelf.numbers()
    axes = [name for name in AXIS_COLUMNS if all_cells[name].nunique(dropna=False) > 1]
    columns = [*axes, "tokens", "acceptance", "accuracy"]
    lines = []
    for cell in cells.head(MOST_LINES).to_dict("records"):
        values = "".join(f"<td>{markup(_as_text(cell[name]))}</td>" for name in columns)
        number = runs.get(cell["digest"])
        digest = markup(cell["digest"][:8])
        button = f'<button class="plain" data-intent="open" data-run="{number}">{digest}</button>'
        lines.append(f"<tr><td>{button if number is not None else digest}</td>{values}</tr>")
    how_many = f"<p class='note'>The first {MOST_LINES} of {len(cells)} cells.</p>" if len(cells) > MOST_LINES else ""
    heads = "".join(f"<th>{markup(name)}</th>" for name in ("run", *columns))
    body = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<h3>Cells</h3><div class='scroll'>{body}</div>{how_many}"


def _as_text(value: object) -> str:
    if value is None or value != value:
        return "—"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
