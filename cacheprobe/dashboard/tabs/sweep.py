"""Shows a sweep: small multiples over any two of its axes, and its cells, each with a button that opens its run."""

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path

import pandas as pd

from cacheprobe.dashboard.figures import graphs
from cacheprobe.dashboard.questions import Answer, CannotShow, Question
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.plots.sweep_grid import MOST, NONE, in_order, sweep_grid
from cacheprobe.plots.text import markup

MOST_LINES = 200


def is_sweep(held: object) -> bool:
    """Returns whether a result file is the plan of a sweep."""
    return isinstance(held, dict) and held.get("format") == "cacheprobe sweep"


def sweep_view(shelf: Shelf, folder: Path, question: Question) -> str | Answer:
    """Returns the small multiples and the table of cells.

    question["facet"]: "ROWS.COLUMNS", two axes that differ among the cells; by default the first two. For an axis
    with too many values, pages of them: "ROWS.COLUMNS.2.0" is the third page of ROWS.
    """
    from cacheprobe.sweeps.index import AXIS_COLUMNS
    from cacheprobe.sweeps.results import load_sweep

    results = load_sweep(folder)
    cells, layers = results.cells, results.layers
    varied = {name: in_order(_named(cells, name).unique()) for name in AXIS_COLUMNS}
    varied = {name: values for name, values in varied.items() if len(values) > 1}
    about = f"{len(cells)} cells of the sweep {folder.name}"
    about += f", {len(results.pending)} more are planned" if results.pending else ""
    about += f"; {results.num_others} of other plans or versions are left out" if results.num_others else ""
    note = f"<p class='note'>{markup(about)}. A cell's button opens its run.</p>"
    if len(varied) < 2 or layers.empty:
        why = "Fewer than two axes have several values" if len(varied) < 2 else "No cell kept readings (run.capture: Z)"
        return f"<h2>{why}, so there is nothing to put side by side</h2>{note}{_cells(shelf, cells, cells)}"
    pairs = [f"{a}.{b}" for a, b in permutations(varied, 2)]
    pair, at = _asked(question.get("facet", pairs[0]), pairs, varied)
    there = cells
    for name, number in at.items():
        values = varied[name][number * MOST : (number + 1) * MOST]
        there, layers = (table[_named(table, name).isin(values)] for table in (there, layers))
    figure = sweep_grid(layers, *at)
    html = f"<h2>{figure.layout.title.text}</h2>{note}{_facets(pairs, pair)}{_stretches(pair, at, varied)}"
    drawn = graphs("result", [figure], dark=question.get("theme") == "dark")
    return {"html": html, "graphs": drawn, "more": _cells(shelf, there, cells)}


def _named(table: pd.DataFrame, axis: str) -> pd.Series:
    """Returns the values of an axis as they are drawn."""
    return table[axis].astype(object).where(table[axis].notna(), NONE)


def _asked(facet: object, pairs: list[str], varied: Mapping[str, Sequence[object]]) -> tuple[str, dict[str, int]]:
    """Returns the pair of axes of a facet, and the page of values of each axis.

    Raises: CannotShow for an unknown pair or page.
    """
    parts = str(facet).split(".")
    named, places = parts[:2], parts[2:] or ["0", "0"]
    pair = ".".join(named)
    if pair not in pairs or len(places) != 2:
        raise CannotShow(f"there is no facet {facet!r:.60}; there are {', '.join(pairs)}")
    at = {}
    for name, number in zip(named, places, strict=True):
        most = (len(varied[name]) - 1) // MOST
        if not (number.isascii() and number.isdecimal()) or len(number) > 9 or int(number) > most:
            raise CannotShow(f"there is no stretch {number!r:.20} of {name}; there are 0 to {most}")
        at[name] = int(number)
    return pair, at


def _stretches(pair: str, at: dict[str, int], varied: Mapping[str, Sequence[object]]) -> str:
    """Returns a button for each page of values, for each axis with more values than are drawn at once."""
    lines = []
    for name in (name for name in at if len(varied[name]) > MOST):
        buttons = []
        for number in range(-(-len(varied[name]) // MOST)):
            values = varied[name][number * MOST : (number + 1) * MOST]
            facet = ".".join([pair, *(str(place) for place in {**at, name: number}.values())])
            said = f"{values[0]} to {values[-1]}" if len(values) > 1 else str(values[0])
            buttons.append(_button(facet, said, number == at[name]))
        lines.append(f'<div class="verdicts">{markup(name)}: {"".join(buttons)}</div>')
    return "".join(lines)


def _facets(pairs: list[str], chosen: str) -> str:
    """Returns a button for each pair of axes; the first axis of a pair goes down."""
    buttons = (_button(pair, " × ".join(pair.split(".")), pair == chosen) for pair in pairs)
    return f'<div class="verdicts">{"".join(buttons)}</div>'


def _button(facet: str, said: str, is_chosen: bool) -> str:
    return (
        f'<button class="plain{" chosen" if is_chosen else ""}" data-intent="set" data-name="facet" '
        f'data-value="{markup(facet)}">{markup(said)}</button>'
    )


def _cells(shelf: Shelf, cells: pd.DataFrame, every: pd.DataFrame) -> str:
    """Returns the cells as a table, with the axes that differ among all cells, and a button to open each run."""
    from cacheprobe.sweeps.index import AXIS_COLUMNS

    runs = shelf.numbers()
    axes = [name for name in AXIS_COLUMNS if every[name].nunique(dropna=False) > 1]
    columns = [*axes, "tokens", "acceptance", "accuracy"]
    lines = []
    for cell in cells.head(MOST_LINES).to_dict("records"):
        said = "".join(f"<td>{markup(_said(cell[name]))}</td>" for name in columns)
        number = runs.get(cell["digest"])
        short = markup(cell["digest"][:8])
        button = f'<button class="plain" data-intent="open" data-run="{number}">{short}</button>'
        lines.append(f"<tr><td>{button if number is not None else short}</td>{said}</tr>")
    cut = f"<p class='note'>The first {MOST_LINES} of {len(cells)} cells.</p>" if len(cells) > MOST_LINES else ""
    heads = "".join(f"<th>{markup(name)}</th>" for name in ("run", *columns))
    body = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<h3>Cells</h3><div class='scroll'>{body}</div>{cut}"


def _said(value: object) -> str:
    if value is None or value != value:
        return "—"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
