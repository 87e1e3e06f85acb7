"""Draws a run step by step: requests downwards, steps across, with a cell for each pass of a request."""

from collections.abc import Iterable, Sequence

import pandas as pd

from cacheprobe.analysis.windows import verified_requests
from cacheprobe.core.values import TableLine
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import Markup, legend
from cacheprobe.views.text import runs_of

LABEL_WIDTH, PITCH, WIDEST = 86, 18, 30
"""Pixels: width of the requests' names, and least and largest width of a step."""
ZOOMED_PITCH = 4, 200
"""Least and largest width of a step in pixels, for steps that a reader chose."""
_DETAILED = 10
"""Least width of a step in pixels at which its cells have textures and hover texts."""
MOST_STEPS, MOST_REQUESTS = 80, 16
"""Largest numbers of steps and of requests in one picture."""
_TOP, _ROW, _LOW_ROW, _GAP = 30, 30, 23, 6
"""Pixels: height of the steps' numbers, of a line of few requests and of one of many, and between two cells."""
_FEW_REQUESTS = 8
_OWN = 1 / 3
"""Share of a cell's height that shows the verifier's own token."""

TIMELINE_LEGEND = (
    ("blue", "ruled-blue", "prefill"),
    ("yellow", "provisional", "token drafted"),
    ("green", None, "accepted"),
    ("red", "rolled-back", "rolled back"),
    ("green", "pending", "verifier's own token, its slot pending"),
    ("green", "verified", "verified slots rebuilt, nothing decided"),
    ("grey", "ruled-grey", "other request, never verified: prefill"),
    ("grey", "dotted-grey", "other request, never verified: decode"),
)
_THIN = '<path d="M10 2v14" class="thin red-stroke"/>'
"""SVG of rolled-back tokens in the legend of narrow steps: a thin line, for readers without colour vision."""
_RARE = {"verified", "ruled-grey", "dotted-grey"}
"""Textures that the legend explains only if the picture has them."""


def timeline(
    events: pd.DataFrame,
    *,
    requests: Iterable[int] | None = None,
    steps: range | None = None,
    chosen: int | None = None,
    step: int | None = None,
) -> Markup:
    """Returns HTML of a run: requests downwards, steps across, and a cell for each pass of a request. Blue prefill,
    yellow draft tokens, green accepted, red rolled back, hatched the verifier's own token, grey a never verified
    request.

    Hover texts describe each pass.
    events: from `Trace.events`.  requests, steps: which to draw; by default the first 16 and the first 80.
    chosen: a request to name in bold.  step: a step to frame.
    Raises: ValueError for an empty table, and for requests and steps that the table does not have.
    """
    known, drawn = drawn_requests(events, requests)
    first, last = int(events.step.min()), int(events.step.max())
    shown = range(first, min(last + 1, first + MOST_STEPS)) if steps is None else steps
    if not shown or shown.step != 1 or shown.start < first or shown.stop > last + 1:
        raise ValueError(f"there is no picture of steps {shown}; the table has {first} to {last}")
    return timeline_picture(events, drawn, shown, len(known), timeline_finding(events), marked=(chosen, step))


def drawn_requests(events: pd.DataFrame, requests: Iterable[int] | None, *more: int) -> tuple[list[int], list[int]]:
    """Returns (ids of all requests in the events table, ids of the requests to draw): `requests`, or the first 16 if
    `requests` is None. more: ids that must be in the table too.

    Raises: ValueError for an empty table, for empty `requests`, and for requests that the table does not have.
    """
    known = sorted(int(r) for r in events.request_id.unique())
    drawn = known[:MOST_REQUESTS] if requests is None else [int(r) for r in requests]
    if events.empty or not drawn:
        raise ValueError("the events table is empty, or no request was named; trace.events() fills it")
    if unknown := sorted({*drawn, *more} - set(known)):
        raise ValueError(f"there is no request {unknown[0]}; the table has {', '.join(map(str, known))}")
    return known, drawn


def timeline_finding(events: pd.DataFrame) -> str:
    """Returns a sentence, as plain text, on the verify passes in an events table: the share of draft tokens that was
    accepted, and the request with the most rolled-back tokens. If nothing was rolled back, drafted or verified, the
    sentence says so instead."""
    verify_events = events[events.phase == "verify"]
    rolled_back = verify_events.groupby("request_id").num_rolled_back.sum()
    if verify_events.empty:
        return "No request was verified: every token was committed as it was decoded"
    drafted = int(verify_events.draft_token_ids.map(len).sum())
    if not drafted:
        return "Nothing was drafted: the verifier went alone"
    if not rolled_back.sum():
        return f"All {drafted} draft tokens were accepted"
    percent = 100 * (drafted - int(rolled_back.sum())) / drafted
    most = rolled_back[rolled_back == rolled_back.max()]
    who = f"request {most.index[0]}" if len(most) == 1 else f"{len(most)} requests"
    worst = f"{who} had most tokens rolled back, {int(most.iloc[0])}{'' if len(most) == 1 else ' each'}"
    return f"{percent:.0f} % of {drafted} draft tokens were accepted; {worst}"


def timeline_picture(
    events: pd.DataFrame,
    requests: Sequence[int],
    steps: range,
    num_requests: int,
    finding: str,
    *,
    marked: tuple[int | None, int | None] = (None, None),
    fit: tuple[float, int, int] = (0, PITCH, WIDEST),
    note: str = "",
) -> Markup:
    """Returns HTML of these requests (downwards) and steps (across). Cells carry data-request and data-step.

    events: of the whole run.  num_requests: of the run.  finding: from `timeline_finding`.  marked: the request to name
    in bold, and the step to frame.
    fit: pixels to fill, if steps can be stretched so far; least and largest width of a step. Narrow steps have no
    textures and no hover texts.  note: HTML that follows the description.
    """
    width, least, most = fit
    pitch = int(min(max((width - LABEL_WIDTH - 4) // len(steps), least), most))
    picture = _picture(events, requests, steps, pitch, *marked)
    count, first, last = len(requests), events.step.min(), events.step.max()
    description = f"{count} of {num_requests} requests, "
    if count == num_requests:
        description = f"All {count} requests, "
    elif count == 1:
        description = f"Request {requests[0]} of {num_requests}, "
    elif list(requests) == list(range(requests[0], requests[0] + count)):
        description = f"Requests {requests[0]} to {requests[-1]} of {num_requests}, "
    is_whole = steps.start <= first and steps.stop > last
    description += "all steps." if is_whole else f"steps {steps.start} to {steps.stop - 1} of {last}."
    is_narrow = pitch < _DETAILED
    keys = legend(
        (_THIN if is_narrow and colour == "red" else svg.swatch(1, 2, colour, texture), meaning)
        for colour, texture, meaning in TIMELINE_LEGEND
        if texture not in _RARE or f"#cp-{texture})" in picture
    )
    return Markup.of(finding, f"<div class='scroll'>{picture}</div>", f"{description}{note}", keys)


def _picture(
    events: pd.DataFrame, requests: Sequence[int], steps: range, pitch: int, chosen: int | None, at: int | None
) -> str:
    """Returns SVG text of these requests (downwards) and steps (across), with a cell for each pass of a request.

    The frame at the step `at` has class `cursor`. The attributes data-first, data-pitch and data-left of the picture
    say where the steps are, so that a page can move the frame.
    A verify pass is one cell. Below, by their shares: the accepted part of the draft (green) and the rolled-back part
    (red, crossed). Above, hatched: the verifier's own token, whose cache slot the next pass writes. A preempted request
    has verify passes without a verdict, which rebuild its cache.
    """
    shown = events[events.step.isin(steps) & events.request_id.isin(list(requests))]
    with_verdict = verified_requests(events)
    row = _ROW if len(requests) <= _FEW_REQUESTS else _LOW_ROW
    y_of_request = {request: _TOP + row * i for i, request in enumerate(requests)}
    is_narrow, every = pitch < _DETAILED, 5 * -(-PITCH // min(pitch, PITCH))
    cell = pitch - (1 if is_narrow else 2)
    width = LABEL_WIDTH + pitch * len(steps) + 4
    height = _TOP + row * len(requests) + 2
    parts = []
    for request, y in y_of_request.items():
        rule = f'<path d="M{LABEL_WIDTH} {y + row - 3}H{width - 4}" class="rule"/>'
        parts.append(request_name(request, y - (_ROW - row) / 2, request == chosen, rule))
    for step in steps:
        has_room = step != steps.start or step % every == 0 or (-step) % every > every // 2
        if (step % every == 0 or step == steps.start) and has_room:
            x = LABEL_WIDTH + pitch * (step - steps.start) + cell / 2
            parts.append(svg.text(x, 14, str(step), "small muted", "middle"))
    for event in shown.itertuples():
        x, y = LABEL_WIDTH + pitch * (event.step - steps.start), y_of_request[event.request_id]
        about = f'data-request="{event.request_id}" data-step="{event.step}"'
        is_other = event.request_id not in with_verdict
        drawn = _cell(event, (x, y), (cell, row - _GAP), is_other=is_other, is_narrow=is_narrow)
        parts.append(f'<g class="pick" {about}>{drawn}</g>')
    x = LABEL_WIDTH + pitch * (0 if at is None else at - steps.start)
    hidden = "" if at in steps else ' style="display:none"'
    frame = f'<rect class="cursor" x="{x - 2:g}" y="{_TOP - 7}" width="{cell + 4:g}" '
    frame += f'height="{row * len(requests) + 4}" rx="5"{hidden}/>'
    label = f"Timeline of {len(requests)} requests, steps {steps.start} to {steps.stop - 1}"
    drawn = svg.picture(width, height, label, [*parts, frame], style=f"width:{width}px;max-width:none")
    facts = f'data-first="{steps.start}" data-last="{steps.stop - 1}" data-pitch="{pitch:g}" data-left="{LABEL_WIDTH}"'
    return drawn.replace("<svg ", f"<svg {facts} ", 1)


def request_name(request: int, y: float, is_chosen: bool, more: str = "") -> str:
    """Returns SVG of a request's name left of its line; it carries data-request. more: SVG elements beside it."""
    name = svg.text(2, y + 17, f"request {request}", "strong" if is_chosen else "muted")
    return f'<g class="pick" data-request="{request}">{name}{more}</g>'


def step_words(event: TableLine) -> str:
    """Returns text on one line of the events table: its phase and its result, such as "verify: 2 of 4 accepted, 2
    rolled back"."""
    if event.phase == "prefill":
        return "prefill" + (": first token committed" if len(event.committed_token_ids) else "")
    if event.phase == "decode":
        return "decode: a token drafted" if len(event.proposed_token_ids) else "decode: a token committed"
    if pd.isna(event.num_accepted):
        if len(event.committed_token_ids):
            return "verify: a token committed without a verdict (the request filled an unused batch index)"
        return "verify: its cache slots are rebuilt"
    drafted, accepted = len(event.draft_token_ids), int(event.num_accepted)
    if not drafted:
        return "verify: no draft, its own token committed"
    rolled_back = drafted - accepted
    return f"verify: {accepted} of {drafted} accepted" + (f", {rolled_back} rolled back" if rolled_back else "")


def _cell(
    event: TableLine, place: tuple[float, float], size: tuple[float, float], *, is_other: bool, is_narrow: bool
) -> str:
    """Returns SVG of the cell of one pass. place, size: (x, y) and (width, height) in pixels."""
    tip = f"request {event.request_id}, step {event.step}; {step_words(event)}"
    if pd.notna(event.draft_start):
        first = int(event.draft_start)
        tip += f"; positions {first} to {first + len(event.target_token_ids) - 1}"
    drawn, (x, y), (width, tall) = [], place, size
    for share, colour, texture in _bands(event, is_other=is_other):
        height = tall * share
        if not height:
            continue
        if is_narrow and colour == "red":
            drawn.append(f'<path d="M{x + width / 2:g} {y:g}v{height:g}" class="thin red-stroke"/>')
        elif is_narrow:
            shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
            drawn.append(f'<rect {shape} class="box {colour}"/>')
        else:
            drawn.append(svg.box(x, y, width, height, colour, texture, radius=3, tip=tip))
        y += height
    return "".join(drawn)


def _bands(event: TableLine, *, is_other: bool) -> list[tuple[float, str, str | None]]:
    """Returns (share of the height, colour, texture) of each part of the cell of one pass, from the top."""
    if event.phase == "prefill":
        return [(1, "grey", "ruled-grey") if is_other else (1, "blue", "ruled-blue")]
    if event.phase == "decode":
        is_draft = len(event.proposed_token_ids) > 0
        return [(1, "yellow", "provisional") if is_draft else (1, "grey", "dotted-grey")]
    if pd.isna(event.num_accepted):
        is_filling = len(event.committed_token_ids) > 0
        return [(1, "grey", "dotted-grey") if is_filling else (1, "green", "verified")]
    drafted, accepted = len(event.draft_token_ids), int(event.num_accepted)
    if not drafted:
        return [(1, "green", "pending")]
    own = _OWN if len(event.committed_token_ids) > accepted else 0.0
    kept = (1 - own) * accepted / drafted
    return [(own, "green", "pending"), (1 - own - kept, "red", "rolled-back"), (kept, "green", None)]


def run_map(events: pd.DataFrame, requests: Sequence[int], steps: range, most_parts: int) -> str:
    """Returns SVG of a whole run as a small map: requests downwards, steps across, a point for each pass of a request.
    Tinted where tokens were accepted, strong where tokens were rolled back, a thin line for other passes.

    requests, steps: all of the run, in the order of the map.  most_parts: the steps are cut into at most so many parts;
    the attribute data-per-part says how many steps a part has. The frame of class "shown" is moved by the page.
    """
    per_part = max(-(-len(steps) // most_parts), 1)
    lines = events.request_id.map({request: i for i, request in enumerate(requests)})
    points = pd.DataFrame({"line": lines, "part": (events.step - steps.start) // per_part})
    is_rolled_back = (events.num_rolled_back > 0).fillna(False)
    layers = {"pass": slice(None), "accepted": (events.num_accepted > 0).fillna(False), "lost": is_rolled_back}
    drawn = []
    for name, chosen in layers.items():
        parts = points[chosen].drop_duplicates().groupby("line").part
        stretches = ((line, runs_of(sorted(of_line.tolist()))) for line, of_line in parts)
        path = "".join(f"M{first} {line}.5h{last + 1 - first}" for line, runs in stretches for first, last in runs)
        drawn.append(f'<path class="{name}" d="{path}"/>')
    label = f"map of {len(requests)} requests by {len(steps)} steps: accepted tinted, rolled back strong"
    height = min(max(4 * len(requests), 24), 200)
    box = f'viewBox="0 0 {max(-(-len(steps) // per_part), 1)} {len(requests)}" preserveAspectRatio="none"'
    facts = f'data-start="{steps.start}" data-per-part="{per_part}" style="height:{height}px"'
    frame = '<rect class="shown" width="0" height="0"/>'
    return f'<svg {box} {facts} class="run-map" role="img" aria-label="{label}">{"".join(drawn)}{frame}</svg>'
