"""Shows the grid of requests by generated tokens at the chosen step."""

from cacheprobe.dashboard.asking import Ask, number, span, whole
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.plots.diagrams.decode_grid import decode_piece
from cacheprobe.plots.diagrams.timeline import MOST_REQUESTS

MOST_TOKENS = 40


def view(shelf: Shelf, ask: Ask) -> str:
    """Returns the grid, as markup."""
    book = shelf.book(ask["run"])
    count = len(book.run.requests)
    requests = span(ask["requests"], "requests", MOST_REQUESTS)
    requests = range(requests.start, min(requests.stop, count))
    places = span(ask["places"], "places", MOST_TOKENS)
    step, chosen = number(ask["step"], "step"), whole(ask["request"], "request", count)
    piece = decode_piece(
        book.history_of(chosen), book.standing(requests, step), requests, places, step, book.run.token_texts,
        verified=book.verified, chosen=(chosen, number(ask["place"], "place")),
    )  # fmt: skip
    return piece.html
