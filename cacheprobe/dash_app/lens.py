"""The lens grid of the page that holds the chosen position, and what gave a row's logit."""

from typing import Any

import pandas as pd

from cacheprobe.dash_app.asking import Ask, NotAsked, number, one_of, whole
from cacheprobe.dash_app.book import Book
from cacheprobe.dash_app.reader import RECORDED, Reader
from cacheprobe.dash_app.shelf import Shelf
from cacheprobe.views.attribution import attribution
from cacheprobe.views.lens_grid import lens_grid
from cacheprobe.views.style import layout_template
from cacheprobe.views.text import markup

MOST_COLUMNS = 40
NARROW = 7
"""Columns: on a narrower page the colours are explained below the grid."""
SITE_WORDS = {"S": "The residual stream", "T": "The attention output", "C": "The MLP output"}


def grid(shelf: Shelf, reader: Reader, ask: Ask) -> tuple[Any, dict[str, Any]]:
    """The figure, and what it is of: title, note, first and last position, and the row of every column."""
    book = shelf.book(ask["run"])
    request = whole(ask["request"], "request", len(book.run.requests))
    include = one_of(ask["rows"], "rows", ("committed", "all"))
    colour = one_of(ask["colour"], "colour", ("logprob", "entropy", "rank"))
    site = one_of(ask["site"], "site", ("S", "T", "C"))
    columns = whole(ask["columns"], "number of columns", MOST_COLUMNS + 1)
    page = book.page(request, number(ask["position"], "position"), include, max(columns, 1))
    if not page:
        raise NotAsked(f"request {request} has no row that predicts a generated token")
    table = readings_of(book, reader, ask["lens"], site, request, page)
    figure = lens_grid(table, request, colour=colour, include=include, positions=page)
    title = figure.layout.title.text
    figure.update_layout(title=None, margin=dict(t=44, b=64, l=44, r=8), template=_template(ask))
    figure.update_layout(height=figure.layout.height - 40)
    if columns < NARROW:
        tall = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
        below = -66 / max(tall, 1)
        figure.data[0].colorbar.update(
            orientation="h", thickness=10, x=0.5, y=below, yanchor="top", title_side="top", title_font_size=12
        )
        figure.update_layout(height=figure.layout.height + 76, margin=dict(b=64 + 76, r=4), showlegend=False)
        figure.update_xaxes(title="position, and the token committed next")
    else:
        figure.data[0].colorbar.update(thickness=10, len=0.9)
    positions = figure.layout.meta["positions"]
    lens = book.run.meta["lens"] if ask["lens"] == RECORDED else str(table.lens.iloc[0])
    last = book.prompt_length(request) - 2 + len(book.run.request(request)["committed_token_ids"])
    about = {
        "title": title,
        "note": f"{SITE_WORDS[site]} of every layer through the {markup(lens)} lens, positions "
        f"{positions[0]} to {positions[-1]} of {last}. A cell names the layer's first choice for the next token; "
        "click one. Underlined columns were computed in the chosen step.",
        "first": page.start,
        "last": page.stop - 1,
        "rows": figure.layout.meta["rows"],
        "layers": figure.layout.meta["layers"],
        "positions": positions,
        "steps": book.run.rows.step.loc[figure.layout.meta["rows"]].tolist(),
    }
    return figure, about


def readings_of(
    book: Book, reader: Reader, lens: object, site: str, request: int, page: range, row: int | None = None
) -> pd.DataFrame:
    """Recorded readings, or kept states read now. row: of that row alone."""
    if lens == RECORDED:
        if not book.run.has_readings:
            raise NotAsked("this run recorded no lens readings; choose a lens that reads its kept states, or run it "
                           "with Z in capture=")  # fmt: skip
        if site != "S":
            raise NotAsked(f"recorded readings are of S; choose a lens that is read now for {site}")
        table = book.readings(request, page)
        return table if row is None else table[table.row == row]
    rows = book.predicting_rows(request)
    rows = rows[rows.position.isin(page)] if row is None else rows[rows.row == row]
    return reader.read(book, str(lens), site, rows)


def chosen_row(book: Book, request: int, position: int, row: object):
    """The row of this number, or the canonical one at this position. Raises: NotAsked where there is none."""
    rows = book.predicting_rows(request)
    if row is not None:
        found = rows[rows.row == number(row, "row")]
    else:
        found = rows[(rows.position == position) & (rows.status == "committed")]
    if found.empty:
        raise NotAsked(
            f"request {request} has no reading at position {position}: readings begin at the prompt's last token, "
            f"position {book.prompt_length(request) - 1}, and end before the newest token"
        )
    return found.iloc[0]


def contributions(shelf: Shelf, reader: Reader, ask: Ask) -> tuple[Any, dict[str, Any]]:
    """Bars of what gave a row's logit, by layer and site. Raises: NotAsked, saying how to record what is missing."""
    book = shelf.book(ask["run"])
    missing = [site for site in "STC" if site not in book.run.sites]
    if missing:
        raise NotAsked(f"this run kept no {' and '.join(missing)}; record them with --capture STCZ, and what attention "
                       "and MLP gave each logit can be told apart")  # fmt: skip
    request = whole(ask["request"], "request", len(book.run.requests))
    row = chosen_row(book, request, number(ask["position"], "position"), ask.get("row"))
    table = reader.attribution(book, int(row.row))
    figure = attribution(table)
    figure.update_layout(template=_template(ask), height=figure.layout.height - 40, margin=dict(t=44, l=52, r=8))
    title = figure.layout.title.text
    figure.update_layout(title=None)
    return figure, {"title": title, "note": "The final norm's scale is held at the row's own; bars sum to the logit."}


def _template(ask: Ask) -> Any:
    return layout_template(dark=ask.get("theme") == "dark")
