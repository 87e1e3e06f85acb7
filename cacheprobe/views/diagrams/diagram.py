"""Draws one verify window of a run as panels: prefill, decode, verify, and the outcome (rollback or no rollback)."""

from collections.abc import Mapping, Sequence

import pandas as pd

from cacheprobe.analysis.windows import Window, verified_requests
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import Markup, Panel, legend, panels_alone
from cacheprobe.views.diagrams.panels import (
    decode_panel,
    outcome_panel,
    prefill_panel,
    token_name,
    token_tip,
    verify_panel,
)
from cacheprobe.views.text import counted, text_of

_SWATCHES = (
    ("blue", None, "", "prefill"),
    ("yellow", "provisional", "", "draft token, provisional slot"),
    ("green", None, "check", "accepted"),
    ("green", "verified", "", "verified slot"),
    ("green", "pending", "", "pending: committed, slot not written yet"),
    ("red", None, "cross", "rolled back, or not used"),
    ("grey", None, "", "other requests"),
)
_KEYS = [
    (svg.swatch(1, 2, colour, texture) + (svg.mark(10, 8.5, sign, 0.7) if sign else ""), meaning)
    for colour, texture, sign, meaning in _SWATCHES
] + [(svg.mark(9, 9, "turn"), "recovered"), (svg.mark(9, 9, "plus"), "bonus")]
"""Legend of the diagrams: (SVG elements within 26 x 18 px, meaning)."""


def window_diagram(
    window: Window,
    events: pd.DataFrame,
    ledgers: Sequence[pd.DataFrame],
    token_texts: Mapping[int, str],
    *,
    is_deterministic: bool = False,
) -> Markup:
    """Returns HTML of one verify window as four panels side by side: prefill, decode, verify, and the outcome (rollback
    or no rollback). On a narrow page the panels are stacked.

    Hover texts name a token's request and position, and the steps that wrote the cache slots.
    window: one of `find_windows(trace.events(), request_id)`.  events: the same table, for the other requests.
    ledgers: [trace.ledger(request_id, step) for step in window.ledger_steps].  token_texts: from `token_texts`.
    Source: figure of LLM-42 (arXiv 2601.17768), prefill, decode, verify, roll back.
    """
    after_prefill, after_decode, after_verify = ledgers
    request, drafted = window.request_id, []
    for i, (token_id, step) in enumerate(zip(window.draft_token_ids, window.decode_steps, strict=True)):
        name, tip = token_name(i + 1, is_draft=True), token_tip(request, window.start + i, "draft token", step)
        chip = svg.Chip(name, text_of(token_texts, token_id), "yellow", "provisional", tip=tip)
        drafted.append((chip, step))
    tip = token_tip(request, window.start - 1, "committed")
    newest = svg.Chip("T₀", text_of(token_texts, window.newest_token_id), "green", tip=tip)
    name = "deterministic request" if is_deterministic else f"request {window.request_id}"
    panels = [
        prefill_panel(events, request, window.prefill_steps, after_prefill, name),
        decode_panel(after_decode, newest, drafted),
        verify_panel(window, token_texts),
        outcome_panel(window, after_verify, token_texts),
    ]
    return _side_by_side(_window_finding(window), panels)


def decoded_diagram(
    request_id: int, events: pd.DataFrame, ledgers: Sequence[pd.DataFrame], token_texts: Mapping[int, str]
) -> Markup:
    """Returns HTML of a never verified request as two panels: its prefill, and the tokens that were committed as they
    were decoded.

    events: from `Trace.events`.  ledgers: trace.ledger(request_id, step) after its last prefill step, and at its end.
    token_texts: from `token_texts`.
    Raises: ValueError for a request that committed no token, and for one that has a verdict.
    """
    of_request = events[events.request_id == request_id]
    if of_request.empty or not of_request.committed_token_ids.map(len).any():
        listed = ", ".join(str(number) for number in sorted(events.request_id.unique()))
        raise ValueError(f"there is no decoding of request {request_id}; the table has events of {listed or 'none'}")
    if request_id in verified_requests(events):
        raise ValueError(f"request {request_id} is verified; draw one of its windows with window_diagram")
    after_prefill, at_end = ledgers
    prefills = of_request[of_request.phase == "prefill"]
    # a preempted request has a second prefill pass, which commits no token
    first_generated = next(int(ids[-1]) for ids in prefills.committed_token_ids if len(ids))
    decoded = [
        (int(token_id), int(event.step))
        for event in of_request[of_request.phase != "prefill"].itertuples()  # with window=1 also verify passes
        for token_id in event.committed_token_ids
    ]
    num_generated = int(of_request.committed_token_ids.map(len).sum())
    # the newest token has no slot yet: the text ends one position after the last slot
    first_position = int(at_end.position.max()) + 1 - (num_generated - 1)
    columns = []
    for i, (token_id, step) in enumerate(decoded, start=1):
        tip = token_tip(request_id, first_position + i, "committed as decoded", step)
        columns.append((svg.Chip(token_name(i), text_of(token_texts, token_id), "grey", tip=tip), step))
    tip = token_tip(request_id, first_position, "committed")
    newest = svg.Chip("T₀", text_of(token_texts, first_generated), "green", tip=tip)
    panels = [
        prefill_panel(events, request_id, prefills.step.tolist(), after_prefill, f"request {request_id}"),
        decode_panel(at_end, newest, columns, is_verified=False),
    ]
    tokens = counted(num_generated, "token")
    return _side_by_side(f"Request {request_id} is never verified: its {tokens} were committed as decoded", panels)


def _side_by_side(finding: str, panels: Sequence[Panel]) -> Markup:
    """Returns the panels with the legend as a `Markup`. finding: plain text."""
    body = f'<div class="panels">{"".join(panel.html for panel in panels)}</div>'
    return Markup.of(finding, body, "", legend(_KEYS), lambda: panels_alone(finding, panels, _KEYS))


def _window_finding(window: Window) -> str:
    """Returns a sentence, as plain text, on a verify window: how many of its draft tokens were rolled back, or that all
    were accepted, or that there were none."""
    drafted, accepted = len(window.draft_token_ids), window.num_accepted
    if window.is_rollback:
        lost = drafted - accepted
        result = f"{lost} of {drafted} draft tokens {'was' if lost == 1 else 'were'} rolled back"
    elif drafted:
        result = f"all {drafted} draft tokens were accepted" if drafted > 1 else "its one draft token was accepted"
    else:
        result = "nothing was drafted"
    return f"Request {window.request_id}, the window that ends in step {window.step}: {result}"
