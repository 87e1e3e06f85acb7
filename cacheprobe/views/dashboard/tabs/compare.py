"""Compares two runs in the dashboard."""

import pandas as pd

from cacheprobe.analysis.comparison import compare_requests, first_reading_difference, lens_of, setting_differences
from cacheprobe.core.records import fingerprint_differences
from cacheprobe.trace.tables.draft_verdicts import draft_counts, drafts_table, rejected_by_place
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.figures import graphs
from cacheprobe.views.dashboard.questions import PageAnswer, PageQuestion, whole
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.report.lens_difference import NothingToCompare, lens_difference
from cacheprobe.views.report.run_comparison import (
    about_request,
    comparison_title,
    counts_block,
    fingerprint_block,
    request_list,
    settings_block,
    token_columns,
)
from cacheprobe.views.text import markup


def view(shelf: Shelf, question: PageQuestion) -> str | PageAnswer:
    """Returns what compares the runs `run` and `against` of the page's question: the settings that differ, what each
    run drafted, which requests differ, the tokens and rejected drafts of one request, and its lens readings with their
    difference. Returns a note if fewer than two runs are open."""
    if sum(entry.book is not None for entry in shelf.entries) < 2:
        return (
            "<h2>One run is open</h2><p class='note'>Name two or more to compare them: "
            "<code>cacheprobe dash RUN OTHER</code>.</p>"
        )
    ours, theirs = shelf.book(question["run"]), shelf.book(question["against"])
    names = (ours.name, theirs.name)
    differences = compare_requests(ours.run.requests, theirs.run.requests, ours.run.events, theirs.run.events)
    settings = setting_differences(ours.run.meta, theirs.run.meta, ours.run.requests, theirs.run.requests)
    counts = draft_counts(ours.run.events), draft_counts(theirs.run.events)
    schedules = fingerprint_block(fingerprint_differences(ours.run.fingerprint, theirs.run.fingerprint), names)
    request = whole(question["request"], "request", len(ours.run.requests))
    one = differences[request]
    head = (
        f"<h2>{markup(comparison_title(differences))}</h2>"
        f"<h3>Settings that differ</h3>{settings_block(settings, names)}"
        f"<h3>What was drafted</h3>{counts_block(counts, names)}"
        f"<h3>{about_request(one)}</h3>{request_list(differences, request)}"
    )
    after = f"<h3>Schedule fingerprints</h3>{schedules}"
    if one.what in ("prompt", "missing"):
        return head + after
    place = one.place if one.what == "tokens" else None
    head += _tokens(ours, theirs, request, place)
    why_not = _why_not_compared(ours, theirs)
    if why_not:
        return f"{head}<p class='note'>{why_not}</p>{after}"
    pair = ours.run.readings(request), theirs.run.readings(request)  # all positions: too large to cache
    html = head + _readings(*pair)
    try:
        figure = lens_difference(*pair, names)
    except NothingToCompare:  # no place in common, as the sentence above says
        return html + after
    dark = question.get("theme") == "dark"
    title = f"<h3>{markup(str(figure.layout.title.text))}</h3>"
    return {"html": html + title, "graphs": graphs("compare", [figure], dark=dark), "more": after}


def _tokens(ours: Book, theirs: Book, request: int, place: int | None) -> str:
    """Returns HTML of the tokens of one request in two runs, with the rejected drafts. place: the first that
    differs."""
    books = ours, theirs
    committed = [book.run.request(request)["committed_token_ids"] for book in books]
    rejected = [rejected_by_place(drafts_table(book.events_of(request))) for book in books]
    texts = [book.run.token_texts for book in books]
    start, names = ours.prompt_length(request), (ours.name, theirs.name)
    return token_columns(committed, place, names, texts, f"request {request}", start, rejected)


def _why_not_compared(ours: Book, theirs: Book) -> str:
    """Returns a sentence on why the lens readings of two runs are not compared; "" if they can be."""
    if not (ours.run.has_readings and theirs.run.has_readings):
        return "Lens readings are not compared: one of the runs recorded none, or none were read yet."
    if lens_of(ours.run.meta) != lens_of(theirs.run.meta):
        return "Lens readings are not compared: the runs were read through different lenses."
    return ""


def _readings(ours: pd.DataFrame, theirs: pd.DataFrame) -> str:
    """Returns HTML: a sentence on the first lens reading of a committed row that differs between two runs. ours,
    theirs: readings of one request."""
    our_lines, their_lines = (table[table.status == "committed"] for table in (ours, theirs))
    shared = our_lines.merge(their_lines[["position", "layer"]], on=["position", "layer"])
    if shared.empty:
        return "<p class='note'>Lens readings are not compared: the runs recorded none of the same places.</p>"
    first_difference = first_reading_difference(shared, their_lines)
    is_all = len(shared) == len(our_lines) == len(their_lines)
    of_shared = "" if is_all else f" of the {len(shared)} that both runs recorded"
    sentence = f"Every lens reading{of_shared} is the same, bit for bit."
    if first_difference is not None:
        position, layer = first_difference
        sentence = f"The first lens reading{of_shared} that differs is that of layer {layer} at position {position}."
    return f"<p class='note'>{sentence} States are compared by <code>cacheprobe verify</code>.</p>"
