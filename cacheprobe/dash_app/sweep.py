"""The sweep's tab: small multiples over any two of its axes, and its cells, each of which leads to its run."""

from itertools import permutations
from pathlib import Path
from typing import Any

from cacheprobe.dash_app.asking import Answer, Ask, NotAsked
from cacheprobe.dash_app.figures import graphs
from cacheprobe.dash_app.shelf import Shelf
from cacheprobe.views.sweep_grid import MOST, sweep_grid
from cacheprobe.views.text import markup

MOST_LINES = 200


def is_sweep(held: Any) -> bool:
    """Whether a result file is the plan of a sweep."""
    return isinstance(held, dict) and held.get("format") == "cacheprobe sweep"


def sweep_view(shelf: Shelf, folder: Path, ask: Ask) -> str | Answer:
    """What is asked: facet, "ROWS.COLUMNS", two axes that differ among the cells; by default the first two."""
    from cacheprobe.sweeps.index import AXIS_COLUMNS
    from cacheprobe.sweeps.results import load_sweep

    results = load_sweep(folder)
    cells, layers = results.cells, results.layers
    varied = [name for name in AXIS_COLUMNS if 1 < cells[name].nunique(dropna=False) <= MOST]
    about = f"{len(cells)} cells of the sweep {folder.name}"
    about += f", {len(results.pending)} more are planned" if results.pending else ""
    about += f"; {results.num_others} of other plans or versions are left out" if results.num_others else ""
    note = f"<p class='note'>{markup(about)}. A cell's button opens its run.</p>"
    if len(varied) < 2 or layers.empty:
        why = "No two axes have between 2 and 8 values" if len(varied) < 2 else "No cell kept readings (run.capture: Z)"
        return f"<h2>{why}, so there is nothing to put side by side</h2>{note}{_cells(shelf, cells)}"
    pairs = [f"{a}.{b}" for a, b in permutations(varied, 2)]
    facet = ask.get("facet", pairs[0])
    if facet not in pairs:
        raise NotAsked(f"there is no facet {facet!r:.60}; there are {', '.join(pairs)}")
    figure = sweep_grid(layers, *facet.split("."))
    html = f"<h2>{figure.layout.title.text}</h2>{note}{_facets(pairs, facet)}"
    drawn = graphs("result", [figure], dark=ask.get("theme") == "dark")
    return {"html": html, "graphs": drawn, "more": _cells(shelf, cells)}


def _facets(pairs: list[str], chosen: str) -> str:
    """A button for each two axes, those that go down first."""
    buttons = "".join(
        f'<button class="plain{" chosen" if pair == chosen else ""}" data-intent="set" data-name="facet" '
        f'data-value="{markup(pair)}">{markup(" × ".join(pair.split(".")))}</button>'
        for pair in pairs
    )
    return f'<div class="verdicts">{buttons}</div>'


def _cells(shelf: Shelf, cells: Any) -> str:
    """The cells as a table; one whose run is on the shelf has a button that opens it."""
    from cacheprobe.sweeps.index import AXIS_COLUMNS

    runs = {entry.name: number for number, entry in enumerate(shelf.entries)}
    axes = [name for name in AXIS_COLUMNS if cells[name].nunique(dropna=False) > 1]
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


def _said(value: Any) -> str:
    if value is None or value != value:
        return "—"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
