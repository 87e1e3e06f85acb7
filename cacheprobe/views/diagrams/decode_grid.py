"""Draws the grid of requests by generated tokens after one step; a cell's texture shows the margin between the two most
likely tokens."""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from cacheprobe.analysis.windows import verified_requests
from cacheprobe.core.values import TableLine
from cacheprobe.trace.tables.token_history import standing_at, token_history
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import Markup, legend
from cacheprobe.views.diagrams.timeline import LABEL_WIDTH, drawn_requests, request_name
from cacheprobe.views.text import counted, text_of, token_label, visible

SETTLED_NATS, CONTESTED_NATS = 2.0, 0.5
"""Margins in nats between the two most likely tokens: a cell is plain from the first number on, and dotted below the
second."""
TOKEN_PITCH = 56
"""Pixels from one token to the next."""
_CELL, _ROW, _TOP = 52, 30, 38
_COLOURS = {"draft": "yellow", "committed": "green", "pending": "green", "rolled_back": "red"}
SIGNS = {"draft": "◇", "committed": "", "pending": "○", "rolled_back": "✗"}
"""Sign in a corner of a cell, by the token's state; the texture shows the margin."""
_STATE_WORDS = {
    "draft": "draft token without a verdict",
    "pending": "pending: newest committed, its final cache slot not written yet",
    "rolled_back": "rolled back",
}

_STATES = (
    ("yellow", None, f"{SIGNS['draft']} draft token"),
    ("green", None, "committed"),
    ("green", "pending", f"{SIGNS['pending']} newest, pending"),
    ("red", "rolled-back", f"{SIGNS['rolled_back']} rolled back now"),
)
_MARGINS = (
    ("grey", None, f"top-two margin ≥ {SETTLED_NATS:g} nats, or not known"),
    ("grey", "crossed-grey", "between"),
    ("grey", "dotted-grey", f"< {CONTESTED_NATS:g} nats"),
)
_LEGEND = "".join(
    legend((svg.swatch(1, 2, colour, texture), name) for colour, texture, name in items)
    for items in (_STATES, _MARGINS)
)

MOST_PLACES = 40
"""Largest number of generated tokens of a request in one picture."""
_NOTE = (
    "Generated tokens by request. A column +4 → +5 holds the fifth one, which the row that reads the fourth predicts; "
    "+0 is the prompt's last token. Texture tells how close the two best tokens were when it was chosen; for the "
    "verifier's own token, the smallest margin of its pass. A bold edge: new in this step. The verifier's own token "
    "stands in place of the first draft token rolled back."
)


def decode_grid(
    events: pd.DataFrame,
    step: int,
    token_texts: Mapping[int, str],
    *,
    requests: Iterable[int] | None = None,
    places: range | None = None,
    chosen: tuple[int, int] | None = None,
) -> Markup:
    """Returns HTML of a grid after one step: a line for each request, a cell for each generated token. Colours show
    draft tokens, committed tokens, tokens rolled back by this step, and never verified requests (grey). Most textures
    show the margin, in nats, between the two most likely tokens.

    The hover text of a cell names the step that drafted or committed the token.
    events: from `Trace.events`, of the whole run.  token_texts: from `token_texts`.  requests, places: which requests
    and generated tokens (0 is the first) to draw; by default the first 16 and the first 40.
    chosen: (request, generated token) to frame; the title then describes this request, else all requests drawn.
    Raises: ValueError for an empty table, and for requests and steps that the table does not have.
    Source: figure of LLM-42 (arXiv 2601.17768), the decode grid.
    """
    chosen_request = (chosen[0],) if chosen else ()
    all_requests, wanted = drawn_requests(events, requests, *chosen_request)
    first, last = int(events.step.min()), int(events.step.max())
    if not first <= step <= last:
        raise ValueError(f"there is no step {step}; the table has {first} to {last}")
    history = token_history(events[events.request_id.isin([*wanted, *chosen_request])])
    with_verdict = verified_requests(events)
    verified = {request: request in with_verdict for request in all_requests}
    return decode_picture(history, wanted, places, step, token_texts, verified=verified, chosen=chosen)


def decode_picture(
    history: pd.DataFrame,
    requests: Sequence[int],
    places: range | None,
    step: int,
    token_texts: Mapping[int, str],
    *,
    verified: Mapping[int, bool],
    chosen: tuple[int, int] | None = None,
) -> Markup:
    """Returns HTML of the grid of requests by generated tokens. Cells carry data-request and data-place.

    history: one line for each drafted or committed token, from `token_history`, of these requests and the chosen one.
    verified: by request, whether its tokens are ever verified; other requests are grey.  places, chosen: as in
    `decode_grid`.
    """
    standing = standing_at(history, step)
    drawn = standing[standing.request_id.isin(list(requests))]
    if places is None:
        places = range(min(int(drawn.place.max()) + 1, MOST_PLACES) if len(drawn) else 1)
    width, height = LABEL_WIDTH + TOKEN_PITCH * len(places) + 4, _TOP + _ROW * len(requests) + 2
    parts = [svg.text(2, 12, "read", "small muted"), svg.text(2, 27, "→ predicts", "small muted")]
    for i, place in enumerate(places):
        for y, position in ((12, f"+{place}"), (27, f"→ +{place + 1}")):
            parts.append(svg.text(_x(i) + _CELL / 2, y, position, "small muted", "middle"))
    y_of_request = {request: _TOP + _ROW * i for i, request in enumerate(requests)}
    for request, y in y_of_request.items():
        parts.append(request_name(request, y, bool(chosen and request == chosen[0])))
    for line in drawn[drawn.place.isin(places)].itertuples():
        x, y = _x(places.index(line.place)), y_of_request[line.request_id]
        parts.append(_token_cell(line, x, y, text_of(token_texts, line.token_id), verified[line.request_id], step))
    if chosen and chosen[0] in y_of_request and chosen[1] in places:
        x, y = _x(places.index(chosen[1])), y_of_request[chosen[0]]
        parts.append(f'<rect class="cursor" x="{x - 2}" y="{y - 2}" width="{_CELL + 4}" height="28" rx="6"/>')
    label = f"Tokens {places.start + 1} to {places.stop} of {len(requests)} requests"
    picture = svg.picture(width, height, label, parts, style=f"width:{width}px;max-width:none")
    finding = _finding(history, standing, list(requests) if chosen is None else [chosen[0]], step)
    return Markup.of(finding, f"<div class='scroll'>{picture}</div>", _NOTE, _LEGEND)


def _finding(history: pd.DataFrame, standing: pd.DataFrame, requests: Sequence[int], step: int) -> str:
    """Returns a sentence, as plain text, on the tokens of these requests after a step."""
    state_counts = standing[standing.request_id.isin(requests)].state.value_counts()
    num_committed = int(state_counts.get("committed", 0) + state_counts.get("pending", 0))
    parts = [f"{counted(num_committed, 'token')} committed"]
    if num_drafts := int(state_counts.get("draft", 0)):
        parts.append(f"{counted(num_drafts, 'draft token')} without a verdict")
    # counted in the history: `standing` shows the recovered token in place of the first rejected one
    is_lost = (history.outcome == "rolled_back").fillna(False)
    lost = history.request_id.isin(requests) & (history.decided_step == step).fillna(False) & is_lost
    if lost.any():
        parts.append(f"{lost.sum()} rolled back now")
    subject = f"{len(requests)} requests have" if len(requests) != 1 else f"request {requests[0]} has"
    return f"After step {step}, {subject} {', '.join(parts)}"


def _token_cell(line: TableLine, x: float, y: float, token: str, is_verified: bool, step: int) -> str:
    colour = _COLOURS[line.state] if is_verified else "grey"
    margin = "margin not known"
    if pd.notna(line.margin_nats):
        smallest = ", the smallest margin of its verify pass" if str(line.outcome) in ("recovered", "bonus") else ""
        margin = f"{line.margin_nats:.2f} nats between the two best tokens{smallest}"
    state_words = _STATE_WORDS.get(line.state, line.state)
    step_words = f"came in step {line.born}"
    if line.state != "draft" and pd.notna(line.decided_step) and line.decided_step != line.born:
        step_words += f", decided in step {line.decided_step}"
    about = f"request {line.request_id}, generated token {line.place + 1}: {visible(token)}"
    tip = f"{about}; {state_words}; {step_words}; {margin}"
    if line.state == "rolled_back":
        texture = "rolled-back"
    elif pd.isna(line.margin_nats) or line.margin_nats >= SETTLED_NATS:
        texture = "pending" if line.state == "pending" and is_verified else None
    else:
        texture = f"{'crossed' if line.margin_nats >= CONTESTED_NATS else 'dotted'}-{colour}"
    box = svg.box(x, y, _CELL, 24, colour, texture, radius=4, tip=tip)
    box += svg.text(x + _CELL / 2, y + 16, token_label(token, 6), f"token halo on-{colour}", "middle")
    if is_verified:
        box += svg.text(x + 3, y + 10, SIGNS[line.state], f"mark halo on-{colour}")
    new_class = " new" if line.born == step else ""
    return f'<g class="pick{new_class}" data-request="{line.request_id}" data-place="{line.place}">{box}</g>'


def _x(column: int) -> int:
    return LABEL_WIDTH + TOKEN_PITCH * column
