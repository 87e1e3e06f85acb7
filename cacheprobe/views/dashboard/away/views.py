"""Declares what can be taken away of each view, and answers the page's questions for it."""

from collections.abc import Callable
from typing import TypeAlias

from dash import html

from cacheprobe.views.dashboard.away import replay, results, tabs
from cacheprobe.views.dashboard.away.spreadsheet import csv_text
from cacheprobe.views.dashboard.away.taken import Sources, Taken
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, PageQuestion, one_of

AWAY: dict[str, Callable[[Sources, PageQuestion], Taken]] = {
    "timeline": replay.timeline,
    "decode": replay.decode,
    "cache": replay.cache_slots,
    "grid": replay.grid,
    "card": replay.card,
    "gave": replay.gave,
    "flip": tabs.flip,
    "window": replay.window,
    "text": replay.text,
    "rejected": tabs.rejected_drafts,
    "thoughts": tabs.thoughts,
    "compare": tabs.compare,
    "result": results.result,
}
"""By view: the function that returns its table and code for the question that the view answered."""
WAYS = {
    "link": ("copy link", "copy the address of what is shown"),
    "svg": ("SVG", "save this view as a vector graphic"),
    "png": ("PNG", "save this view as an image"),
    "csv": ("CSV", "save the table of this view"),
    "code": ("code", "show the Python code that makes this view in a notebook"),
}
"""By way to take a view: the button's name and hover text. assets/away.js makes the buttons."""
_OF_THE_SERVER = ("csv", "code")

Element: TypeAlias = object
"""Dash component, as in `shell`."""


def bar(view: str) -> Element:
    """Returns the bar of buttons of a view; without CSV and code for a view that `AWAY` does not declare."""
    ways = [way for way in WAYS if view in AWAY or way not in _OF_THE_SERVER]
    about = {"data-ways": " ".join(ways), "data-of": view, "aria-label": "take this view away"}
    return html.Div(className="away", role="group", **about)


def dialog() -> Element:
    """Returns the dialog that shows code, and a link that the browser does not let the page copy."""
    buttons = [html.Button("Copy", id="away-copy", className="plain"), html.Button("Close", className="plain")]
    content = [html.H2(id="away-title"), html.Pre(id="away-text"), html.Div(buttons, className="verdicts")]
    return html.Dialog(content, id="away", **{"aria-labelledby": "away-title"})


def take(sources: Sources, question: PageQuestion) -> PageAnswer:
    """Returns the table of a view as CSV, or its code, as a dict for the page: csv or code; and, of a run that is not
    finished, recorded: how far it is.

    question: view; way, "csv" or "code"; question, the one that the view answered.
    """
    view, way = one_of(question["view"], "view", tuple(AWAY)), one_of(question["way"], "way", _OF_THE_SERVER)
    asked = question["question"]
    if not isinstance(asked, dict):
        raise CannotShow(f"question is an object, got {asked!r:.40}")
    recorded = _recorded_so_far(sources, asked)
    taken = AWAY[view](sources, asked)
    if way == "code":
        return {"code": "\n".join(taken.code) + "\n"}
    return {"csv": csv_text(taken.table()), **({"recorded": recorded} if recorded else {})}


def _recorded_so_far(sources: Sources, question: PageQuestion) -> str:
    """Returns how far the run of a question is, for the name of a file: "recorded up to step 41"; "" for a run that is
    finished. A CSV holds what is recorded when it is saved, which can be more than the page shows."""
    if question.get("run") is None:
        return ""
    book = sources.shelf.book(question["run"])
    return f"recorded up to step {book.steps.stop - 1}" if "growing" in book.run.meta else ""
