"""Shows requests by step, one page of each."""

from cacheprobe.dashboard.questions import Question, number, span
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.plots.diagrams.timeline import MOST_REQUESTS, MOST_STEPS, timeline_piece


def view(shelf: Shelf, question: Question) -> str:
    """Returns the timeline of a page, as markup."""
    book = shelf.book(question["run"])
    there = range(len(book.run.requests))
    requests = [r for r in span(question["requests"], "requests", MOST_REQUESTS) if r in there]
    steps = span(question["steps"], "steps", MOST_STEPS)
    steps = range(steps.start, min(steps.stop, book.steps.stop))
    piece = timeline_piece(
        book.events_of_all(requests), requests, steps, there, book.steps, book.finding,
        width=number(question["width"], "width"), note=" A cell is one pass of one request; click one.",
    )  # fmt: skip
    return piece.html
