"""Compares two runs."""

from cacheprobe.analysis.comparison import compare_requests, first_reading_difference
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.dashboard.book import Book
from cacheprobe.dashboard.questions import Question, whole
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.plots.report.run_comparison import (
    about_request,
    comparison_title,
    fingerprint_block,
    request_list,
    token_columns,
)
from cacheprobe.plots.text import markup


def view(shelf: Shelf, question: Question) -> str:
    """Returns the comparison of two runs, as markup."""
    if sum(entry.book is not None for entry in shelf.entries) < 2:
        return (
            "<h2>One run is open</h2><p class='note'>Name two or more to compare them: "
            "<code>cacheprobe dash RUN OTHER</code>.</p>"
        )
    ours, theirs = shelf.book(question["run"]), shelf.book(question["against"])
    names = (ours.name, theirs.name)
    found = compare_requests(ours.run.requests, theirs.run.requests, ours.run.events, theirs.run.events)
    schedules = fingerprint_block(fingerprint_differences(ours.run.fingerprint, theirs.run.fingerprint), names)
    request = whole(question["request"], "request", len(ours.run.requests))
    one = found[request]
    parts = [
        f"<h2>{markup(comparison_title(found))}</h2>{request_list(found, request)}",
        f"<h3>{about_request(one)}</h3>",
    ]
    if one.what not in ("prompt", "missing"):
        pair = [book.run.request(request)["committed_token_ids"] for book in (ours, theirs)]
        place = one.place if one.what == "tokens" else None
        texts = [book.run.token_texts for book in (ours, theirs)]
        parts.append(token_columns(pair, place, names, texts, f"request {request}", ours.prompt_length(request)))
        parts.append(_readings(ours, theirs, request))
    return f"{''.join(parts)}<h3>Schedule fingerprints</h3>{schedules}"


def _readings(ours: Book, theirs: Book, request: int) -> str:
    """Returns a paragraph on the first lens reading that differs."""
    if not (ours.run.has_readings and theirs.run.has_readings):
        return "<p class='note'>Lens readings are not compared: one of the runs recorded none.</p>"
    if ours.run.meta["lens"] != theirs.run.meta["lens"]:
        return "<p class='note'>Lens readings are not compared: the runs were read through different lenses.</p>"
    pair = [book.run.readings(request) for book in (ours, theirs)]  # all positions: too large to cache
    mine, other = (table[table.status == "committed"] for table in pair)
    shared = mine.merge(other[["position", "layer"]], on=["position", "layer"])
    if shared.empty:
        return "<p class='note'>Lens readings are not compared: the runs recorded none of the same places.</p>"
    where = first_reading_difference(shared, other)
    which = "" if len(shared) == len(mine) == len(other) else f" of the {len(shared)} that both runs recorded"
    said = (
        f"Every lens reading of it{which} is the same, bit for bit."
        if where is None
        else f"The first lens reading that differs{which} is that of layer {where[1]} at position {where[0]}."
    )
    return f"<p class='note'>{said} States are compared by <code>cacheprobe verify</code>.</p>"
