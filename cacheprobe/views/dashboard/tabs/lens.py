"""Shows the page of the lens grid with the chosen position, and the logit attribution of a row."""

from typing import get_args

import pandas as pd

from cacheprobe.core.hook_names import SITES, site_label
from cacheprobe.views.attribution import attribution
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.figures import graphs
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, PageQuestion, number, one_of
from cacheprobe.views.dashboard.reader import RECORDED, RunReader
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.diagrams.lens_grid import LABEL_WIDTH, PITCH, grid_of
from cacheprobe.views.lens_table import BELOW, Include, Measure, finding, select
from cacheprobe.views.text import markup

MOST_COLUMNS = 40


def grid(shelf: Shelf, reader: RunReader, question: PageQuestion) -> str:
    """Returns HTML of the lens grid: the page of positions that has the chosen position. The attributes data-first and
    data-last of the element are the first and last position of the page."""
    book, request = shelf.book_and_request(question)
    include: Include = one_of(question["rows"], "rows", get_args(Include))
    colour: Measure = one_of(question["colour"], "colour", get_args(Measure))
    site = one_of(question["site"], "site", ("S", "T", "C"))
    width, page = number(question["width"], "width"), page_of(book, request, question)
    is_recorded = question["lens"] == RECORDED and book.run.has_readings
    # the finding of the whole request, as in the report; the page's readings are then lines of the whole ones
    title = book.lens_finding(request) if is_recorded else None
    table = readings_of(book, reader, question["lens"], site, request, page)
    picture = grid_of(
        table, request, colour=colour, include=include, positions=page, width=width, has_tips=False,
        title=title,
    )  # fmt: skip
    lines_shown = select(table, request, include, page)
    if title is None:
        title = f"{finding(lines_shown, request)}, over the positions of this page"
    lens = book.run.meta["lens"] if question["lens"] == RECORDED else str(table.lens.iloc[0])
    last_position = book.prompt_length(request) - 2 + len(book.run.request(request)["committed_token_ids"])
    first_shown, last_shown = lines_shown.position.min(), lines_shown.position.max()
    return (
        f"<h2>{title}</h2><p class='note'>{site_label(site)} of every layer through the "
        f"{markup(lens)} lens, rows that read positions {first_shown} to {last_shown} of {last_position}. "
        f"A cell names the layer's first choice for the next position; click one. Below a column: {BELOW}. "
        "Underlined columns were computed in the chosen step.</p>"
        f"<div class='page' data-first='{page.start}' data-last='{page.stop - 1}'>{picture.html}</div>"
    )


def page_of(book: Book, request: int, question: PageQuestion) -> range:
    """Returns the positions of the page of the lens grid that a question names. Raises: CannotShow if the request has
    no row that predicts a generated token."""
    include: Include = one_of(question["rows"], "rows", get_args(Include))
    columns = min(max((number(question["width"], "width") - LABEL_WIDTH - 4) // PITCH, 1), MOST_COLUMNS)
    page = book.page(request, number(question["position"], "position"), include, columns)
    if not page:
        raise CannotShow(f"request {request} has no row that predicts a generated token")
    return page


def readings_of(
    book: Book, reader: RunReader, lens: object, site: str, request: int, page: range, row: int | None = None
) -> pd.DataFrame:
    """Returns lens readings of one request as a DataFrame: the recorded readings, or readings computed now from kept
    states. page: range of positions. row: number of one row to read, instead of all rows of the page.

    Raises: CannotShow if the run recorded no readings of the site, if states cannot be read, or for an unknown lens.
    """
    if lens == RECORDED:
        if not book.run.has_readings:
            or_run = "" if book.run.is_unread else ", or run it with Z in capture="
            raise CannotShow(f"this run recorded no lens readings; choose a lens that reads its kept states{or_run}")
        if site != "S":
            raise CannotShow(f"recorded readings are of S; choose a lens that is read now for {site}")
        table = book.readings(request, page)
        return table if row is None else table[table.row == row]
    rows = book.predicting_rows(request)
    rows = rows[rows.position.isin(page)] if row is None else rows[rows.row == row]
    return reader.read(book, str(lens), site, rows)


def chosen_row(book: Book, request: int, position: int, row: object) -> pd.Series:
    """Returns one line of the rows table as a Series: the row with number `row`, or the committed row at `position` if
    `row` is None. Raises: CannotShow if there is no such row among the rows that predict generated tokens."""
    rows = book.predicting_rows(request)
    if row is not None:
        matching = rows[rows.row == number(row, "row")]
    else:
        matching = rows[(rows.position == position) & (rows.status == "committed")]
    if matching.empty:
        raise CannotShow(
            f"request {request} has no reading at position {position}: readings begin at the prompt's last token, "
            f"position {book.prompt_length(request) - 1}, and end before the newest token"
        )
    return matching.iloc[0]


def contributions(shelf: Shelf, reader: RunReader, question: PageQuestion) -> PageAnswer:
    """Returns the logit attribution of one row as a dict for the page: a heading, a note, and a figure of bars by layer
    for T (attention) and C (MLP). Raises: CannotShow if the run did not keep S, T and C, or if the row or its model is
    missing."""
    book, request = shelf.book_and_request(question)
    missing = [site for site in SITES if site not in book.run.sites]
    if missing:
        raise CannotShow(
            f"this run kept no {' and '.join(map(site_label, missing))}; record them with --capture STCZ: each "
            "logit can then be split into the parts of attention and MLP"
        )
    row = chosen_row(book, request, number(question["position"], "position"), question.get("row"))
    figure = attribution(reader.attribution(book, int(row.row)))
    figure.update_layout(margin=dict(l=52, r=8))
    note = "The final norm's scale is held at the row's own; bars sum to the logit."
    html = f"<h3>{figure.layout.title.text}</h3><p class='note'>{note}</p>"
    # "gave" is the id of the figure's place, below the button "What gave this logit?"
    return {"html": html, "graphs": graphs("gave", [figure], dark=question.get("theme") == "dark")}
