"""Prepares the list of rejected drafts for a page or a terminal."""

from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.core.terminal import Listing
from cacheprobe.core.values import TableLine
from cacheprobe.views.report.page import table
from cacheprobe.views.text import plain, shorten, visible

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

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


def rejections(table: pd.DataFrame) -> list[list[object]]:
    """Returns one line of cells for each line of `Trace.rejected`; "—" for null."""
    lines: list[list[object]] = []
    for line in table.itertuples():
        before = plain(line.text_before)
        cells: list[object] = [line.request_id, line.step, line.position, shorten(before[::-1], _WIDTH)[::-1]]
        cells += [quoted(line.drafted_token), quoted(line.committed_token)]
        cells += [line.num_rolled_back, line.drafted_step]
        cells += ["—" if pd.isna(line.drafter_layer) else int(line.drafter_layer), flip_of(line), margin_of(line)]
        lines.append(cells)
    return lines


def rejections_listing(trace: "Trace", request_id: int | None = None) -> Listing:
    """Returns a `Listing` with the rejected drafts of a run, or of one request. Raises: KeyError for a request that the
    trace does not have."""
    found = trace.rejected()
    if request_id is not None:
        trace.committed(request_id)
        found = found[found.request_id == request_id]
    rows = [tuple(map(str, line)) for line in rejections(found)]
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
    summary = (
        f"{len(found):,} rejected draft{'s' * (len(found) != 1)} in {num_requests} request{'s' * (num_requests != 1)}"
    )
    lines = table(list(_HEADINGS), rejections(found.iloc[:_MOST]))
    return f"{head}{note}<details open><summary>{summary}</summary>{lines}</details>"


def flip_of(line: TableLine) -> int | str:
    """Returns the layer from which the committed token stays the first choice; "never" without such a layer, "—"
    without lens readings."""
    if pd.isna(line.margin_at_least_nats):
        return "—"
    return "never" if pd.isna(line.flip_layer) else int(line.flip_layer)


def margin_of(line: TableLine) -> str:
    """Returns the margin, or what it is more than, in nats with two digits; "—" without lens readings."""
    if pd.isna(line.margin_at_least_nats):
        return "—"
    return f"{'> ' * bool(pd.isna(line.margin_nats))}{line.margin_at_least_nats:.2f}"


def quoted(token: object) -> str:
    """Returns a token's text in quotation marks, cut to a width; "—" for a null."""
    return "—" if not isinstance(token, str) else f"“{shorten(visible(token), _WIDTH)}”"
