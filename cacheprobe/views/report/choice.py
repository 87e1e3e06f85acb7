"""Chooses the requests of a report, and takes the paths of a machine out of texts that leave it."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs, urlsplit

from cacheprobe.views.report.insight import first_to_show
from cacheprobe.views.text import counted

if TYPE_CHECKING:
    import pandas as pd

    from cacheprobe.trace.trace import Trace

MOST_CHOSEN = 8
"""Largest number of requests that a report draws if none is named."""
_REASON = "those with notes, then that of the first partly accepted draft, then those that lost most draft tokens"
"""How the requests are chosen if none is named."""


class RequestChoice(NamedTuple):
    """Holds the requests that a report is to draw."""

    request_ids: tuple[int, ...]
    """The most important one first: the last ones are left out if the report gets too large."""
    reason: str
    """Text on how they were chosen; "" if they were named."""


def choose_requests(
    trace: "Trace", notes: "pd.DataFrame", requests: "int | Sequence[int] | str | None"
) -> RequestChoice:
    """Returns the requests that a report draws.

    notes: of `trace.notes.table()`.  requests: one id or several; "all"; or None for 8 of them: first those with notes,
    then that of the first partly accepted draft, then those with the most rolled-back draft tokens.
    Raises: KeyError for a request that the trace does not have; ValueError for another text, and for no request.
    """
    known = sorted(trace.tokens)
    if requests is None or requests == "all":
        lost = trace.event_table.groupby("request_id").num_rolled_back.sum()
        by_losses = sorted(known, key=lambda request_id: (-int(lost.get(request_id, 0)), request_id))
        first = first_to_show(trace.event_table)
        ordered = tuple(dict.fromkeys([*notes.request_id.tolist(), *(first or ())[:1], *by_losses]))
        return RequestChoice(
            ordered if requests else ordered[:MOST_CHOSEN], "" if len(known) <= MOST_CHOSEN else _REASON
        )
    if isinstance(requests, str):
        raise ValueError(f'requests is an id, a list of ids, or "all", got {requests!r}')
    named = tuple(dict.fromkeys(map(int, requests if isinstance(requests, Sequence) else [requests])))
    if not named:
        raise ValueError('requests names no request; give an id, a list of ids, or "all"')
    if unknown := [request_id for request_id in named if request_id not in trace.tokens]:
        raise KeyError(f"no request {unknown[0]} in this trace; it has {known}")
    return RequestChoice(named, "")


def drawn_within(choice: RequestChoice, draw: Callable[[int], str], room: int) -> dict[int, str]:
    """Returns a dict from request id to HTML, in the order of ids: of requests that together have at most `room` bytes.
    Those of a choice are drawn in their order, until eight were too large.  draw: function from a request's id to its
    HTML."""
    drawn: dict[int, str] = {}
    for tried, request_id in enumerate(choice.request_ids):
        if tried - len(drawn) == MOST_CHOSEN:
            break
        html = draw(request_id)
        size = len(html.encode("utf-8", "replace"))
        if size <= room:
            drawn[request_id] = html
            room -= size
    return dict(sorted(drawn.items()))


def choice_sentence(choice: RequestChoice, drawn: Sequence[int], count: int) -> str:
    """Returns plain text: which requests a report draws, why, and which ones it has no room for. count: of all."""
    if not choice.request_ids:
        return "The run has no request."
    shown = f"{len(drawn)} of {counted(count, 'request')}" if len(drawn) < count else f"All {count} requests"
    text = f"{'Its one request' if count == len(drawn) == 1 else shown} can be read below in full"
    text += f": {', '.join(map(str, drawn))}" if 0 < len(drawn) < count else ""
    text += f" ({choice.reason})." if choice.reason and len(drawn) < count else "."
    if left_out := len(choice.request_ids) - len(drawn):
        text += f" {counted(left_out, 'chosen request')} would make the file larger than 4 MB; name fewer to see them."
    if len(drawn) < count:
        text += " Others are drawn by requests=[...] in Python, or --request."
    return text


_IN_NAME = r"""/\\'"<>|;,()\n"""
_PATH = re.compile(rf"(?<![\w.:/\\~-])(?:~|[A-Za-z]:)?[/\\](?:[^\s{_IN_NAME}][^{_IN_NAME}]*[/\\])*([^\s{_IN_NAME}]*)")
"""An absolute path, of Linux or Windows, or one below the home directory. Folders may have spaces in their names."""


def without_paths(text: str) -> str:
    """Returns a text with every absolute path cut to its last part: "/home/ann/models/small" becomes "…/small"."""
    return _PATH.sub(lambda found: f"…/{found[1]}" if len(found[0]) > 1 else found[0], text)


def dashboard_of(address: str) -> str:
    """Returns the address of a run in a dashboard, which ends with "run=N". Raises: ValueError for text that is no
    address.

    address: of the dashboard; with "?run=N" for another run than its first.
    """
    try:
        parts = urlsplit(address)
        run = parse_qs(parts.query).get("run", ["0"])[0]
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and run.isdecimal():
            return f"{parts.scheme}://{parts.netloc}{parts.path or '/'}?run={run}"
    except ValueError:  # a port that is no number
        pass
    raise ValueError(
        f"dashboard= is the address that `cacheprobe dash` prints, such as http://127.0.0.1:8050/, got {address!r}"
    )
