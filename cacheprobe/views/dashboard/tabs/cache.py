"""Shows the cache of the chosen request after the chosen step, and the verify window of that step."""

from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.questions import PageQuestion, number
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.diagrams.cache import cache_piece, memory_sentence
from cacheprobe.views.diagrams.diagram import (
    decoded_finding,
    decoded_phases,
    side_by_side,
    window_finding,
    window_phases,
)
from cacheprobe.views.diagrams.frame import TitledPicture
from cacheprobe.views.diagrams.windows import Window


def view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML: the picture of one request's cache slots after a step, and a sentence on the cache memory of all
    requests. Returns a note if the request has no cache slots after this step."""
    book, request = shelf.book_and_request(question)
    step = number(question["step"], "step")
    ledger = book.ledger(request, step)
    if ledger.empty:
        if (book.events_of(request).step <= step).any():
            return (
                f"<h2>Request {request} holds no cache slots after step {step}</h2><p class='note'>It was preempted, "
                "and freed its slots.</p>"
            )
        return (
            f"<h2>Request {request} holds no cache slots yet</h2><p class='note'>After step {step} it has not been "
            "read; move on to a step of its own.</p>"
        )
    window = window_at(book, request, step)
    truncated = window.num_truncated if window is not None and window.step == step else 0
    has_ended, config = book.has_ended(request, step), book.run.meta["config"]
    num_slots, num_requests = book.slots_in_use(step)
    memory = memory_sentence(
        len(ledger), num_slots, num_requests, config["capacity"], book.run.meta.get("cache_row_bytes"),
        has_ended=has_ended,
    )  # fmt: skip
    pending = pending_position(book, request, step, int(ledger.position.max()))
    return cache_piece(
        ledger, memory, request_id=request, step=step, pending=pending, truncated=truncated, has_ended=has_ended,
        windows=book.windows(request),
    ).html  # fmt: skip


def window_view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML: the four panels of a verify window of the request, the first that ends at the step or later, else
    the last. For a never verified request: two panels. Without either: a title that says so."""
    book, request = shelf.book_and_request(question)
    window = window_at(book, request, number(question["step"], "step"))
    events, texts = book.run.events, book.run.token_texts
    if window is not None:
        ledgers = [book.ledger(request, step) for step in window.ledger_steps]
        if ledgers[-1].empty:
            return _preempted(request, window.step)
        is_deterministic = bool(book.run.request(request)["is_deterministic"])
        panels = side_by_side(window_phases(window, events, ledgers, texts, is_deterministic=is_deterministic))
        return TitledPicture(window_finding(window), "", panels).html
    of_request = book.events_of(request)
    prefills = of_request[of_request.phase == "prefill"]
    if book.verified[request] or not prefills.committed_token_ids.map(len).any():
        return f"<h2>No verify window of request {request} at or after this step</h2>"
    last = int(of_request.step.max())
    ledgers = [book.ledger(request, int(prefills.step.max())), book.ledger(request, last)]
    if ledgers[-1].empty:
        return _preempted(request, last)
    return TitledPicture(
        decoded_finding(of_request), "", side_by_side(decoded_phases(request, events, ledgers, texts))
    ).html


def _preempted(request: int, step: int) -> str:
    return f"<h2>Request {request} was preempted in step {step}, and freed its cache slots</h2>"


def window_at(book: Book, request: int, step: int) -> Window | None:
    """Returns the first verify window of a request that ends at this step or later, else the last window; None without
    any."""
    windows = book.windows(request)
    return next((w for w in windows if w.step >= step), windows[-1] if windows else None)


def pending_position(book: Book, request: int, step: int, last: int) -> int | None:
    """Returns the position of the newest committed token if its cache slot is the next to be written; else None. last:
    position of the last slot."""
    if book.has_ended(request, step):
        return None
    of_request = book.events_of(request)
    num_committed = int(of_request[of_request.step <= step].committed_token_ids.map(len).sum())
    return last + 1 if num_committed and book.prompt_length(request) + num_committed - 1 == last + 1 else None
