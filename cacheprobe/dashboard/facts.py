"""Answers what the page must know of a run, and of a request, before it asks for pictures."""

from cacheprobe.core.values import JsonDict
from cacheprobe.dashboard.book import Book
from cacheprobe.dashboard.questions import Question
from cacheprobe.dashboard.reader import Reader
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.plots.report.prompt_block import prompt_block

LONGEST_PROMPT = 44
"""Number of characters of a prompt's end in the menu of requests."""


def run_facts(shelf: Shelf, reader: Reader, question: Question) -> JsonDict:
    """Returns requests, steps, layers and menus of a run."""
    book = shelf.book(question["run"])
    run = book.run
    return {
        "name": book.name,
        "says": sentence(book),
        "requests": [_request_label(r) for r in run.requests],
        "first": book.steps.start,
        "last": book.steps.stop - 1,
        "opening": book.opening,
        "layers": list(run.layers) or run.meta["capture"]["layers"],
        "sites": [site for site in "STC" if site in run.sites or site == "S"],
        "lenses": reader.menu(book),
        "why_not": reader.why_not(book),
        "has_readings": run.has_readings,
    }


def request_story(shelf: Shelf, question: Question) -> JsonDict:
    """Returns the steps of one request in words, and the lengths of its prompt and answer."""
    book, request_id = shelf.book_and_request(question)
    request = book.run.request(request_id)
    return {
        "steps": book.story(request_id),
        "prompt": len(request["prompt_token_ids"]),
        "tokens": len(request["committed_token_ids"]),
    }


def prompt_view(shelf: Shelf, question: Question) -> str:
    """Returns the prompt and the answer of a request, as markup."""
    book, request_id = shelf.book_and_request(question)
    request = book.run.request(request_id)
    asked, given = len(request["prompt_token_ids"]), len(request["committed_token_ids"])
    return (
        f"<h2>Request {request['request_id']} was asked in {asked} tokens and answered in {given}</h2>"
        f"{prompt_block(request, book.run.token_texts)}"
    )


def sentence(book: Book) -> str:
    """Returns the run in one line of plain text."""
    run, events = book.run, book.run.events
    finger = run.fingerprint
    passes = events.step.nunique()
    said = f"{finger['model']} in {finger['dtype']}, {len(run.requests)} requests in {passes} passes. "
    verdicts = events[events.phase == "verify"]
    drafted = int(verdicts.draft_token_ids.map(len).sum())
    lost = int(verdicts.num_rolled_back.fillna(0).sum())
    if not drafted:
        return said + "Nothing was drafted."
    by = run.meta["drafter"] or "The fast path"
    return f"{said}{by} drafted {drafted} candidates: {drafted - lost} accepted, {lost} rolled back."


def _request_label(request: JsonDict) -> str:
    prompt = request["prompt"] if isinstance(request["prompt"], str) else "token ids"
    end = " ".join(prompt.split())
    end = end if len(end) <= LONGEST_PROMPT else "…" + end[-LONGEST_PROMPT:]
    kind = " · deterministic" if request["is_deterministic"] else ""
    return f"request {request['request_id']}{kind} · {end}"
