"""Shows a request as text, coloured by a measure, and a range of its tokens in numbers."""

from typing import get_args

import pandas as pd

from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number, one_of
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.report.request_text import (
    MOST_TOKENS,
    TextMeasure,
    TextParts,
    text_piece,
    with_differences,
    with_feature,
)
from cacheprobe.views.text import markup, plain, text_of


def view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML: the prompt of a request and its generated tokens, the 2,000 of the page of the question's place.
    Raises: CannotShow for a measure of readings if the run has none."""
    book, request = shelf.book_and_request(question)
    measure: TextMeasure = one_of(question["measure"], "measure", get_args(TextMeasure))
    first = MOST_TOKENS * (max(number(question["place"], "place"), 0) // MOST_TOKENS)
    try:
        parts = _parts(book, request, measure, question)
        piece = text_piece(parts, book.run.token_texts, measure, range(first, first + MOST_TOKENS), says="data-says")
    except ValueError as error:
        raise CannotShow(str(error)) from error
    return piece.html


def _parts(book: Book, request: int, measure: TextMeasure, question: PageQuestion) -> TextParts:
    """Returns the tables that the text is drawn from. Raises: ValueError for the measure "feature" of a run without
    recorded features, or "difference" of a run that is no replay; CannotShow if no feature was chosen."""
    parts = book.text_parts(request)
    if measure == "difference" and "replay" in book.run.meta:
        return with_differences(parts, book.differences_of(request))
    if measure != "feature":
        return parts
    lines = book.features_of(request)
    if question.get("feature") is None:
        raise CannotShow("no feature is chosen; click one on the card of a token")
    return with_feature(parts, lines, number(question["feature"], "feature"))


def range_view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML: what was drafted, accepted and rejected in a range of generated tokens, and means or medians of
    their measures. The question's positions are those of the rows that predict the first and the last token."""
    book, request = shelf.book_and_request(question)
    ends = sorted((number(question["position"], "position"), number(question["until"], "until")))
    return f"<p class='note'>{range_words(book, request, range(ends[0], ends[1] + 1))}</p>"


def range_words(book: Book, request: int, positions: range) -> str:
    """Returns HTML of sentences on the tokens that the rows at `positions` predict. Raises: CannotShow if there are
    none."""
    parts = book.text_parts(request)
    tokens = parts.tokens[parts.tokens.position.between(positions.start, positions.stop - 1)]
    if tokens.empty:
        raise CannotShow(f"request {request} generated no token in this range; choose two of its tokens")
    first, last, count = tokens.place.iloc[0] + 1, tokens.place.iloc[-1] + 1, len(tokens)
    accepted = int((tokens.outcome == "accepted").sum())
    rejected = sum(len(parts.rejected.get(place, ())) for place in tokens.place.tolist())
    text = plain("".join(text_of(book.run.token_texts, int(t)) for t in tokens.token_id))
    says = f"Tokens {first} to {last}, <b>{markup(text)}</b>: {count} token{'s' * (count != 1)}, "
    says += f"{accepted} of them accepted drafts; {rejected} draft{'s' * (rejected != 1)} rejected"
    means = [
        f"mean {words} {value:.2f} nats"
        for name, words in (("logprob", "log-probability"), ("entropy", "entropy"))
        if not pd.isna(value := tokens[name].astype("Float64").mean())
    ]
    if not pd.isna(depth := tokens.depth.astype("Float64").median()):
        means.append(f"median prediction depth layer {depth:g}")
    return says + (f"; through the {markup(parts.lens)} lens: {', '.join(means)}." if means else ".")
