"""Lists rejected drafts: for the dashboard, where the list is sorted, searched and filtered, and for a report or a
terminal."""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from cacheprobe.core.terminal import Listing
from cacheprobe.core.values import TableLine
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.rejected import (
    DECIDING_COLUMNS,
    judging_rows,
    layers_that_decided,
    rejected_drafts,
    with_layers,
)
from cacheprobe.views.report.page import table
from cacheprobe.views.text import counted, plain, shorten, text_of, visible

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


LINES_A_PAGE = 50
COLUMNS = {
    "drafted": ("drafted", "drafted_token"),
    "committed": ("committed", "committed_token"),
    "request": ("request", "request_id"),
    "step": ("step", "step"),
    "position": ("position", "position"),
    "drafter": ("drafter’s layer", "drafter_layer"),
    "flip": ("committed first from layer", "flip_layer"),
    "margin": ("margin, nats", "margin_at_least_nats"),
}
"""Heading and column of the table, by the key in the page's address by which the list is sorted."""

Range = tuple[float | None, float | None]
"""Least and most, both included; None for no limit."""


class Selection(NamedTuple):
    """Says which rejected drafts the list holds, and in which order."""

    find: str = ""
    """Text that the list's lines contain, case ignored; "" for all lines."""
    sort: str = ""
    """Key of COLUMNS, with "-" in front for the largest first; "" for the order of requests and steps."""
    request: int | None = None
    """Only the rejected drafts of this request; None for all."""
    drafter: int | None = None
    """Only drafts of a pass that ended at this layer, or -1 for those of all layers or of no pass; None for all."""
    flips: Range | str | None = None
    """Only lines whose committed token is first from one of these layers on; "none" for those without such a layer;
    None for all."""
    margin: Range | None = None
    """Only lines whose margin is in this range, in nats; None for all. A margin of which only a least value is known
    is in no range that has a most."""

    @property
    def condition(self) -> str:
        """Condition on the lines of `Trace.rejected`, for `DataFrame.query`, without the searched text; "" for none."""
        parts = [] if self.request is None else [f"request_id == {self.request}"]
        if self.drafter is not None:
            parts.append("drafter_layer.isna()" if self.drafter == -1 else f"drafter_layer == {self.drafter}")
        if isinstance(self.flips, str):
            parts.append("flip_layer.isna()")
        else:
            parts += _within("flip_layer", "flip_layer", self.flips)
        return " and ".join([*parts, *_within("margin_at_least_nats", "margin_nats", self.margin)])


def _within(low: str, high: str, limits: Range | None) -> list[str]:
    """Returns the conditions of a range: column `low` has its least, column `high` its most. A null is in no range."""
    if limits is None:
        return []
    least, most = limits
    ends = ("" if least is None else f"{low} >= {least}", "" if most is None else f"{high} <= {most}")
    return [f"{low}.notna()", *filter(None, ends)]


def rejected_of_run(run: StoredRun) -> pd.DataFrame:
    """Returns the table of `Trace.rejected` of a stored run."""
    prompts = {request["request_id"]: request["prompt_token_ids"] for request in run.requests}
    tokens = {request["request_id"]: request["committed_token_ids"] for request in run.requests}
    drafts = rejected_drafts(run.events, run.rows, prompts, tokens, run.token_texts)
    if drafts.empty or not run.has_readings:
        return with_layers(drafts, None)
    judging = judging_rows(drafts, run.rows).dropna().astype("int64").tolist()
    return with_layers(drafts, layers_that_decided(drafts, run.readings_of_rows(judging, DECIDING_COLUMNS)))


def selected(drafts: pd.DataFrame, selection: Selection, run: StoredRun) -> pd.DataFrame:
    """Returns the lines of a table of `Trace.rejected` that the list holds, in its order; unknown values come last.
    run: the texts of its requests are searched."""
    condition, column = selection.condition, COLUMNS.get(selection.sort.removeprefix("-"), ("", ""))[1]
    found = drafts.query(condition, engine="python") if condition else drafts
    if selection.find:
        found = found[_has(found, searchable(selection.find), run)]
    if column:
        key = (lambda texts: texts.map(searchable, na_action="ignore")) if column.endswith("token") else None
        found = found.sort_values(column, kind="stable", ascending=not selection.sort.startswith("-"), key=key)
    return found


def _has(drafts: pd.DataFrame, wanted: str, run: StoredRun) -> list[bool]:
    """Returns a bool for each line: whether `wanted`, from `searchable`, is in the request's text up to the drafted
    token or up to the committed one, these included."""
    texts = {}
    for request_id in drafts.request_id.unique().tolist():
        request = run.request(request_id)
        ids = (*request["prompt_token_ids"], *request["committed_token_ids"])
        tokens = [searchable(text_of(run.token_texts, token)) for token in ids]
        texts[request_id] = "".join(tokens), [0, *accumulate(map(len, tokens))]
    found = []
    for line in drafts.fillna({"committed_token": ""}).itertuples():
        text, starts = texts[line.request_id]
        before = text[: starts[line.position]]
        found.append(any(wanted in before + searchable(one) for one in (line.drafted_token, line.committed_token)))
    return found


def walked(shown: pd.DataFrame, is_sorted: bool, place: tuple[int, int, int], by: int) -> int | None:
    """Returns the place in a list, counted from 0, that is `by` lines on from the line at `place`; of the nearest line
    if the list ends before it. None for an empty list, and if `place` is already the last on that side.

    shown: from `selected`.  place: (request, step, position) of a drafted token. If no line is there, the walk begins
    between its neighbours in a list in the order of requests and steps; in a sorted one (is_sorted) before the first
    line, or behind the last one.
    """
    sign = 1 if by > 0 else -1
    found = np.flatnonzero((shown.request_id == place[0]).to_numpy() & (shown.position == place[2]).to_numpy())
    if len(found):
        start = int(found[0])
    elif not is_sorted:
        steps = list(zip(shown.request_id.tolist(), shown.step.tolist(), strict=True))
        start = bisect_right(steps, place[:2]) - 1 if by > 0 else bisect_left(steps, place[:2])
    else:
        start = -1 if by > 0 else len(shown)
    return min(max(start + by, 0), len(shown) - 1) if 0 <= start + sign < len(shown) else None


def searchable(text: str) -> str:
    """Returns a text as a search compares it: spaces as spaces, and in one case."""
    return plain(text).casefold() if text else ""


_HEADINGS = (
    "request", "step", "position", "text before", "drafted", "committed", "tokens lost", "drafted in step",
    "drafter's layer", "committed first from layer", "margin, nats",
)  # fmt: skip
FLIP_WORDS = (
    "The committed token is the lens’s first choice from the named layer up to the last one; “never”: it is not the "
    "last layer’s."
)
"""Text that explains the column "committed first from layer"."""
_WIDTH = 32
"""Largest width of the text before a token, and of a token, in columns of a monospaced font."""
_MOST = 500
"""Largest number of lines in a report."""


def cells_of(line: TableLine) -> dict[str, object]:
    """Returns the cells of one line of `Trace.rejected` by the keys of COLUMNS; "—" for null."""
    drafter = "—" if pd.isna(line.drafter_layer) else int(line.drafter_layer)
    flip, margin = "—", "—"  # without lens readings
    if not pd.isna(line.margin_at_least_nats):
        flip = "never" if pd.isna(line.flip_layer) else int(line.flip_layer)
        margin = f"{'> ' * bool(pd.isna(line.margin_nats))}{line.margin_at_least_nats:.2f}"
    tokens = (quoted(line.drafted_token), quoted(line.committed_token))
    values = (*tokens, line.request_id, line.step, line.position, drafter, flip, margin)
    return dict(zip(COLUMNS, values, strict=True))


def _rejections(table: pd.DataFrame) -> list[list[object]]:
    """Returns one line of cells, in the order of _HEADINGS, for each line of `Trace.rejected`."""
    lines: list[list[object]] = []
    for line in table.itertuples():
        cells, before = cells_of(line), shorten(plain(line.text_before)[::-1], _WIDTH)[::-1]
        first = [*(cells[key] for key in ("request", "step", "position")), before, cells["drafted"], cells["committed"]]
        rest = [cells[key] for key in ("drafter", "flip", "margin")]
        lines.append([*first, line.num_rolled_back, line.drafted_step, *rest])
    return lines


def rejections_listing(trace: "Trace", request_id: int | None = None) -> Listing:
    """Returns a `Listing` with the rejected drafts of a run, or of one request. Raises: KeyError for a request that the
    trace does not have."""
    found = trace.rejected()
    if request_id is not None:
        trace.committed(request_id)
        found = found[found.request_id == request_id]
    rows = [tuple(map(str, line)) for line in _rejections(found)]
    return Listing("rejected drafts", _HEADINGS, rows, "" if rows else "no draft was rejected")


def rejections_section(trace: "Trace") -> str:
    """Returns HTML with the rejected drafts of all requests of a run."""
    found, head = trace.rejected(), "<h2>Every rejected draft</h2>"
    if found.empty:
        return f"{head}<p class='note'>No draft of this run was rejected.</p>"
    more = f" The first {_MOST} of {len(found):,} are shown." if len(found) > _MOST else ""
    note = (
        f"<p class='note'>Each line is the first token of a draft that the verifier did not choose. {FLIP_WORDS} The "
        "margin is how much more log-probability the last layer gives to the committed token; “&gt;” says that the "
        f"draft token is not among the top tokens read. “—”: not known, or a draft of all layers or of none.{more}</p>"
    )
    num_requests = found.request_id.nunique()
    summary = f"{len(found):,} rejected draft{'s' * (len(found) != 1)} in {counted(num_requests, 'request')}"
    lines = table(list(_HEADINGS), _rejections(found.iloc[:_MOST]))
    return f"{head}{note}<details open><summary>{summary}</summary>{lines}</details>"


def quoted(token: object) -> str:
    """Returns a token's text in quotation marks, cut to a width; "—" for a null."""
    return "—" if not isinstance(token, str) else f"“{shorten(visible(token), _WIDTH)}”"
