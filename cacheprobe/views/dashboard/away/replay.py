"""Tables and code of the views of the replay."""

from functools import partial
from typing import get_args

import pandas as pd

from cacheprobe.trace.tables.token_history import tokens_with_texts
from cacheprobe.views.dashboard.away.taken import Sources, Taken, lens_code, opened, opened_for, opened_with_model
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number, one_of, requests_of, span, whole
from cacheprobe.views.dashboard.reader import RECORDED
from cacheprobe.views.dashboard.tabs import cache
from cacheprobe.views.dashboard.tabs.lens import chosen_row, page_of, readings_of
from cacheprobe.views.dashboard.tabs.timeline import MOST_ZOOMED
from cacheprobe.views.diagrams.timeline import MOST_REQUESTS, MOST_STEPS
from cacheprobe.views.diagrams.windows import Window
from cacheprobe.views.lens_table import select
from cacheprobe.views.report.request_text import TextMeasure

_READINGS = "readings = cp.analysis.lens_readings(trace, include_rolled_back=True)"


def timeline(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the passes of the requests and steps that the timeline shows."""
    book = sources.shelf.book(question["run"])
    requests, steps = (
        requests_of(question, book.by_losses, MOST_REQUESTS),
        span(question["steps"], "steps", MOST_ZOOMED),
    )
    steps = range(steps.start, min(steps.stop, book.steps.stop))

    def table() -> pd.DataFrame:
        """Returns lines of the events table."""
        events = book.run.events
        return events[events.request_id.isin(requests) & events.step.isin(steps)]

    code = [
        *opened(book),
        "events = trace.events()",
        f"table = events[events.request_id.isin({requests}) & events.step.isin({steps})]",
        f"cp.plots.timeline(events, requests={requests}, steps={steps})",
    ]
    return Taken(table, code)


def decode(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the tokens in the cells of the decode grid."""
    book = sources.shelf.book(question["run"])
    requests, places = (
        requests_of(question, book.by_losses, MOST_REQUESTS),
        span(question["places"], "places", MOST_STEPS),
    )
    step, request = number(question["step"], "step"), whole(question["request"], "request", len(book.run.requests))

    def table() -> pd.DataFrame:
        """Returns lines of `cp.analysis.tokens_at`."""
        tokens = tokens_with_texts(book.tokens_after(requests, step), book.run.token_texts)
        return tokens[tokens.place.isin(places)]

    code = [
        *opened(book),
        f"table = cp.analysis.tokens_at(trace, {step})",
        f"table = table[table.request_id.isin({requests}) & table.place.isin({places})]",
        f"cp.plots.decode_grid(trace.events(), {step}, trace.token_texts, requests={requests}, places={places}, "
        f"chosen=({request}, {number(question['place'], 'place')}))",
    ]
    return Taken(table, code)


def cache_slots(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the cache slots of the chosen request after the chosen step."""
    book, request = sources.shelf.book_and_request(question)
    step = number(question["step"], "step")
    ledger = book.ledger(request, step)
    code = [*opened(book), f"table = trace.ledger({request}, {step})"]
    if not ledger.empty:
        window = cache.window_at(book, request, step)
        truncated = window.num_truncated if window is not None and window.step == step else 0
        pending = cache.pending_position(book, request, step, int(ledger.position.max()))
        code += [
            f"cp.plots.cache_picture(table, request_id={request}, step={step}, pending={pending}, "
            f"truncated={truncated}, has_ended={book.has_ended(request, step)})"
        ]
    return Taken(lambda: ledger, code)


def window(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the rows that the drafts and the verify pass of a window computed; all rows of a request without one."""
    book, request = sources.shelf.book_and_request(question)
    found = cache.window_at(book, request, number(question["step"], "step"))
    rows = book.rows_of(request)
    begin = [*opened(book), "events = trace.events()", f"table = trace.rows({request})"]
    if found is None:
        return Taken(lambda: rows, [*begin, *_decoded(book, request)])
    steps = sorted({*found.decode_steps, found.step})
    return Taken(
        lambda: rows[rows.step.isin(steps)],
        [*begin, f"table = table[table.step.isin({steps})]", *_verified(book, found)],
    )


def _verified(book: Book, found: Window) -> list[str]:
    is_deterministic = bool(book.run.request(found.request_id)["is_deterministic"])
    return [
        f"windows = cp.plots.find_windows(events, {found.request_id})",
        f"window = next(window for window in windows if window.step == {found.step})",
        f"ledgers = [trace.ledger({found.request_id}, step) for step in window.ledger_steps]",
        "cp.plots.window_diagram(window, events, ledgers, trace.token_texts, "
        f"is_deterministic={is_deterministic})",
    ]  # fmt: skip


def _decoded(book: Book, request: int) -> list[str]:
    """Returns the lines of code of the picture of a request that was never verified; none if it generated nothing."""
    events = book.events_of(request)
    prefills = events[events.phase == "prefill"]
    if book.verified[request] or not prefills.committed_token_ids.map(len).any():
        return []
    steps = int(prefills.step.max()), int(events.step.max())
    return [
        f"ledgers = [trace.ledger({request}, step) for step in {steps}]",
        f"cp.plots.decoded_diagram({request}, events, ledgers, trace.token_texts)",
    ]


def text(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the generated tokens of a request, with their measures."""
    book, request = sources.shelf.book_and_request(question)
    measure = one_of(question["measure"], "measure", get_args(TextMeasure))
    if measure not in ("verdict", "feature", "difference") and not book.run.has_readings:
        raise CannotShow(f"this run has no readings to take the {measure} from; choose the verdict")
    readings = "trace.hypotheses()" if book.run.has_readings else "None"
    thoughts = ", trace.thoughts()" if book.run.thoughts is not None else ""
    table, features = f"cp.analysis.generated_tokens(trace, {request})", ""
    wanted = partial(tokens_with_texts, book.text_parts(request).tokens, book.run.token_texts)
    if measure == "feature":
        if book.run.features is None or question.get("feature") is None:
            raise CannotShow("no feature is chosen, or this run recorded none")
        feature, chosen = number(question["feature"], "feature"), f"request_id == {request}"
        table = f"trace.features(top={book.run.meta['capture']['top_features']}).query({chosen!r})"
        wanted, features = partial(book.features_of(request).query, chosen), f", features=table, feature={feature}"
    if measure == "difference":
        if "replay" not in book.run.meta:
            raise CannotShow("this run is no replay, so there is no other program to compare with")
        chosen = ["request_id", "position", "token_id", "logprob_nats", "other_logprob_nats", "difference_nats"]
        table = f"cp.analysis.engine_differences(trace).query('request_id == {request}')[{chosen}]"
        wanted, features = partial(book.differences_of, request), ", differences=table"
    code = [
        *opened(book),
        f"table = {table}",
        f"cp.plots.request_text(trace.rows(), trace.events(), {request}, {readings}{thoughts}, "
        f"measure={measure!r}, texts=trace.token_texts{features})",
    ]
    return Taken(wanted, code)


def grid(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the readings on the page of the lens grid."""
    shelf, reader, _ = sources
    book, request = shelf.book_and_request(question)
    site, lens, include = one_of(question["site"], "site", ("S", "T", "C")), question["lens"], question["rows"]
    page = page_of(book, request, question)
    code = opened_for(shelf, book, lens)
    if lens == RECORDED:
        code += [_READINGS, f"table = readings[(readings.request_id == {request}) & readings.position.isin({page})]"]
    else:
        code += [
            f"rows = trace.rows({request})",
            f"rows = rows[rows.position.isin({page}) & (rows.state_index >= 0)]",
            f"readings = cp.analysis.read_states(trace, {lens_code(shelf, lens)}, {site!r}, rows=rows)",
            "table = readings",
        ]
    code += ['table = table[table.status == "committed"]'] if include == "committed" else []
    code += [
        f"cp.plots.lens_grid(readings, {request}, colour={question['colour']!r}, include={include!r}, positions={page})"
    ]
    return Taken(lambda: select(readings_of(book, reader, lens, site, request, page), request, include, page), code)


def card(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the readings of the row that the card shows."""
    shelf, reader, _ = sources
    book, request = shelf.book_and_request(question)
    site, lens = one_of(question["site"], "site", ("S", "T", "C")), question["lens"]
    row = chosen_row(book, request, number(question["position"], "position"), question.get("row"))
    position, row_number = int(row.position), int(row.row)

    def table() -> pd.DataFrame:
        """Returns lines of `cp.analysis.lens_readings` or `cp.analysis.read_states`."""
        return readings_of(book, reader, lens, site, request, range(position, position + 1), row_number)

    code = opened_for(shelf, book, lens)
    if lens == RECORDED:
        code += [_READINGS, f"table = readings[readings.row == {row_number}]"]
    else:
        code += [
            f"rows = trace.rows({request})",
            f"rows = rows[rows.row == {row_number}]",
            f"table = cp.analysis.read_states(trace, {lens_code(shelf, lens)}, {site!r}, rows=rows)",
        ]
    which = "" if row.status == "committed" else f"row={row_number}, "
    code += [
        f"cp.plots.token_card(table, trace.rows(), trace.events(), {request}, {position}, {which}"
        "token_texts=trace.token_texts)"
    ]
    return Taken(table, code)


def gave(sources: Sources, question: PageQuestion) -> Taken:
    """Takes the logit attribution of a row."""
    shelf, reader, _ = sources
    book, request = shelf.book_and_request(question)
    row = chosen_row(book, request, number(question["position"], "position"), question.get("row"))
    code = [
        *opened_with_model(shelf, book),
        f"table = cp.analysis.attribution(trace, {request}, row={int(row.row)})",
        "cp.plots.attribution(table)",
    ]
    return Taken(lambda: reader.attribution(book, int(row.row)), code)
