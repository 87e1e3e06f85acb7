"""Shows the grid of requests by generated tokens after the chosen step."""

from cacheprobe.views.dashboard.questions import PageQuestion, number, requests_of, span, whole
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.diagrams.decode_grid import decode_piece
from cacheprobe.views.diagrams.timeline import MOST_REQUESTS

MOST_TOKENS = 40


def view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML of a grid after one step: a line for each request, a cell for each committed or drafted token."""
    book = shelf.book(question["run"])
    count = len(book.run.requests)
    requests = requests_of(question, book.by_losses, MOST_REQUESTS)
    places = span(question["places"], "places", MOST_TOKENS)
    step, chosen = number(question["step"], "step"), whole(question["request"], "request", count)
    piece = decode_piece(
        book.history_of(chosen), book.tokens_after(requests, step), requests, places, step, book.run.token_texts,
        verified=book.verified, chosen=(chosen, number(question["place"], "place")),
    )  # fmt: skip
    return piece.html
