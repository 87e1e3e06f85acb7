"""Shows a sweep: small multiples over any two of its axes, and its cells, each with a button that opens its run."""

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.views.dashboard.figures import graphs
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, PageQuestion
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.dashboard.tabs.tables import selected_lines, sortable
from cacheprobe.views.sweep_grid import MOST, NONE, in_order, sweep_grid
from cacheprobe.views.text import markup

if TYPE_CHECKING:
    from cacheprobe.sweeps.results import Sweep


def is_sweep(content: object) -> bool:
    """Returns True if the content of a result file is the plan of a sweep."""
    return isinstance(content, dict) and content.get("format") == "cacheprobe sweep"


class SweepPage(NamedTuple):
    """Holds what the tab shows of a sweep for one question."""

    results: "Sweep"
    varied: Mapping[str, Sequence[object]]
    """By axis that differs among the cells: its values in order."""
    pair: str
    """The two axes that are drawn, as "ROWS.COLUMNS"; "" if nothing can be drawn."""
    pages: dict[str, int]
    """By drawn axis: the number of the page of its values."""
    cells: pd.DataFrame
    """Of the drawn values: the columns of the table."""

    def drawn(self, table: pd.DataFrame) -> pd.DataFrame:
        """Returns the lines of a table of cells or layers whose values are drawn."""
        for name in self.pages:
            table = table[_axis_values(table, name).isin(self.shown(name))]
        return table

    def shown(self, axis: str) -> list[object]:
        """Returns the values of a drawn axis that its page holds."""
        page = self.pages[axis]
        return list(self.varied[axis][page * MOST : (page + 1) * MOST])


def sweep_page(folder: Path, question: PageQuestion) -> SweepPage:
    """Returns what a question asks to see of the sweep in a folder.

    question["facet"]: "ROWS.COLUMNS", two axes that differ among the cells; by default the first two. For an axis with
    too many values, pages of them: "ROWS.COLUMNS.2.0" is the third page of ROWS.
    Raises: CannotShow for an unknown facet.
    """
    from cacheprobe.sweeps.results import AXIS_COLUMNS, load_sweep

    results = load_sweep(folder)
    varied = {name: in_order(_axis_values(results.cells, name).unique()) for name in AXIS_COLUMNS}
    varied = {name: values for name, values in varied.items() if len(values) > 1}
    pair, pages = "", {}
    if len(varied) > 1 and not results.layers.empty:
        pairs = pairs_of(varied)
        pair, pages = _parse_facet(question.get("facet", pairs[0]), pairs, varied)
    page = SweepPage(results, varied, pair, pages, results.cells)
    axes = [name for name in AXIS_COLUMNS if results.cells[name].nunique(dropna=False) > 1]
    columns = ["digest", *axes, "tokens", "acceptance", "accuracy"]
    return page._replace(cells=page.drawn(results.cells)[columns])


def pairs_of(varied: Mapping[str, object]) -> list[str]:
    """Returns the pairs of axes that can be drawn, as "ROWS.COLUMNS"."""
    return [f"{a}.{b}" for a, b in permutations(varied, 2)]


def sweep_view(shelf: Shelf, folder: Path, question: PageQuestion) -> PageAnswer:
    """Returns a dict for the page: the small multiples of a sweep over two axes, buttons for other axes, and a table of
    the cells. Without two axes that differ, or without readings, the table alone."""
    page = sweep_page(folder, question)
    results = page.results
    about = f"{len(results.cells)} cells of the sweep {folder.name}"
    about += f", {len(results.pending)} more are planned" if results.pending else ""
    about += f"; {results.num_others} of other plans or versions are left out" if results.num_others else ""
    note = f"<p class='note'>{markup(about)}. A cell's button opens its run.</p>"
    more = _cells_table(shelf, page, question)
    if not page.pair:
        has_axes = len(page.varied) > 1
        reason = "No cell kept readings (run.capture: Z)" if has_axes else "Fewer than two axes have several values"
        return {"html": f"<h2>{reason}, so there is nothing to put side by side</h2>{note}", "more": more}
    figure = sweep_grid(page.drawn(results.layers), *page.pages)
    pairs = pairs_of(page.varied)
    buttons = f"{_pair_buttons(pairs, page.pair)}{_page_buttons(page.pair, page.pages, page.varied)}"
    html = f"<h2>{figure.layout.title.text}</h2>{note}{buttons}"
    return {"html": html, "graphs": graphs("result", [figure], dark=question.get("theme") == "dark"), "more": more}


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


def _cells_table(shelf: Shelf, page: SweepPage, question: PageQuestion) -> str:
    """Returns HTML: a table of cells that can be sorted and filtered, with a button that opens the cell's run, the axes
    that differ among all cells, and results."""
    runs = shelf.numbers()

    def opens(digest: object, _line: JsonDict) -> str:
        """Returns HTML of the button of a cell; its digest, if its run is not at hand."""
        number, name = runs.get(str(digest)), markup(str(digest)[:8])
        button = f'<button class="plain" data-intent="open" data-run="{number}">{name}</button>'
        return button if number is not None else name

    lines = selected_lines(page.cells, question)
    return f"<h3>Cells</h3>{sortable(lines, len(page.cells), question, {'digest': opens})}"
