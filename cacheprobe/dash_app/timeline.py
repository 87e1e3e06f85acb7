"""Requests by step, a page of each."""

from cacheprobe.dash_app.asking import Ask, number, span
from cacheprobe.dash_app.shelf import Shelf
from cacheprobe.views.text import markup
from cacheprobe.views.timeline import TIMELINE_LEGEND, key, timeline_picture

MOST_STEPS, MOST_REQUESTS = 80, 16
"""Of one page: more is not seen at once."""


def view(shelf: Shelf, ask: Ask) -> str:
    book = shelf.book(ask["run"])
    count = len(book.run.requests)
    requests = span(ask["requests"], "requests", MOST_REQUESTS)
    steps = span(ask["steps"], "steps", MOST_STEPS)
    shown = [r for r in requests if r < count]
    steps = range(steps.start, min(steps.stop, book.steps.stop))
    picture = timeline_picture(book.run.events, shown, steps, width=number(ask["width"], "width"))
    note = f"Requests {shown[0]} to {shown[-1]} of {count}, " if len(shown) < count else f"All {count} requests, "
    whole_run = len(steps) == len(book.steps)
    note += "all steps." if whole_run else f"steps {steps.start} to {steps.stop - 1} of {book.steps.stop - 1}."
    return (
        f"<h2>{markup(_title(book))}</h2><p class='note'>{note} A cell is one pass of one request; click one.</p>"
        f"<div class='scroll'>{picture}</div>{key(TIMELINE_LEGEND)}"
    )


def _title(book) -> str:
    """Who lost most of what was drafted for it."""
    verdicts = book.run.events[book.run.events.phase == "verify"]
    lost = verdicts.groupby("request_id").num_rolled_back.sum()
    if verdicts.empty:
        return "No request was verified: every token was committed as it was decoded"
    drafted = int(verdicts.draft_token_ids.map(len).sum())
    if not lost.sum():
        return f"All {drafted} candidates were accepted" if drafted else "Nothing was drafted: the verifier went alone"
    kept = 100 * (drafted - int(lost.sum())) / drafted
    most = int(lost.idxmax())
    return f"{kept:.0f} % of {drafted} candidates were accepted; request {most} lost most, {int(lost.max())}"
