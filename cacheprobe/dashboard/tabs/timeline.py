"""Shows the run step by step: one page of requests and steps."""

from cacheprobe.dashboard.questions import PageQuestion, number, span
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.plots.diagrams.timeline import MOST_REQUESTS, MOST_STEPS, timeline_piece


def view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML of the timeline: requests by steps, for the requests and steps of the page's question."""
    book = shelf.book(question["run"])
    all_requests = range(len(book.run.requests))
    requests = [r for r in span(question["requests"], "requests", MOST_REQUESTS) if r in all_requests]
    steps = span(question["steps"], "steps", MOST_STEPS)
    steps = range(steps.start, min(steps.stop, book.steps.stop))
    width = (
        0 if "growing" in book.run.meta else number(question["width"], "width")
    )  # steps of one width, however many there are
    piece = timeline_piece(
        book.events_of_all(requests), requests, steps, all_requests, book.steps, book.finding,
        width=width, note=" A cell is one pass of one request; click one.",
    )  # fmt: skip
    return piece.html
