"""Compares two runs in the dashboard."""

from cacheprobe.analysis.comparison import compare_requests, first_reading_difference
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.dashboard.book import Book
from cacheprobe.dashboard.questions import PageQuestion, whole
from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.plots.report.run_comparison import (
    about_request,
    comparison_title,
    fingerprint_block,
    request_list,
    token_columns,
)
from cacheprobe.plots.text import markup


def view(shelf: Shelf, question: PageQuestion) -> str:
    """Returns HTML that compares the runs `run` and `against` of the page's question: which requests differ, the tokens
    that both runs generated for one request, whether its lens readings are equal, and the schedule fingerprints.
    Returns a note if fewer than two runs are open."""
    if sum(entry.book is not None for entry in shelf.entries) < 2:
        return (
            "<h2>One run is open</h2><p class='note'>Name two or more to compare them: "
            "<code>cacheprobe dash RUN OTHER</code>.</p>"
        )
    ours, theirs = shelf.book(question["run"]), shelf.book(question["against"])
    names = (ours.name, theirs.name)
    differences = compare_requests(ours.run.requests, theirs.run.requests, ours.run.events, theirs.run.events)
    schedules = fingerprint_block(fingerprint_differences(ours.run.fingerprint, theirs.run.fingerprint), names)
    request = whole(question["request"], "request", len(ours.run.requests))
    one = differences[request]
    parts = [
        f"<h2>{markup(comparison_title(differences))}</h2>{request_list(differences, request)}",
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
    """Returns HTML: a sentence on the first lens reading of a committed row that differs between two runs, or on why
    readings are not compared."""
    if not (ours.run.has_readings and theirs.run.has_readings):
        return "<p class='note'>Lens readings are not compared: one of the runs recorded none.</p>"
    if ours.run.meta["lens"] != theirs.run.meta["lens"]:
        return "<p class='note'>Lens readings are not compared: the runs were read through different lenses.</p>"
    readings = [book.run.readings(request) for book in (ours, theirs)]  # all positions: too large to cache
    our_lines, their_lines = (table[table.status == "committed"] for table in readings)
    shared = our_lines.merge(their_lines[["position", "layer"]], on=["position", "layer"])
    if shared.empty:
        return "<p class='note'>Lens readings are not compared: the runs recorded none of the same places.</p>"
    first_difference = first_reading_difference(shared, their_lines)
    is_all = len(shared) == len(our_lines) == len(their_lines)
    of_shared = "" if is_all else f" of the {len(shared)} that both runs recorded"
    sentence = f"Every lens reading of it{of_shared} is the same, bit for bit."
    if first_difference is not None:
        position, layer = first_difference
        sentence = f"The first lens reading that differs{of_shared} is that of layer {layer} at position {position}."
    return f"<p class='note'>{sentence} States are compared by <code>cacheprobe verify</code>.</p>"
