"""Writes the part of the report that is about one request: its text, verify windows, thoughts and lens grid."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from cacheprobe.analysis.measures import lens_readings
from cacheprobe.analysis.windows import find_windows
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.trace.tables.draft_verdicts import verified_drafts
from cacheprobe.views.report.figures import MOST_POSITIONS, report_grids, report_windows
from cacheprobe.views.report.page import Link, block, link, table
from cacheprobe.views.report.request_text import text_parts, text_piece
from cacheprobe.views.text import counted, markup, text_of, token_texts
from cacheprobe.views.thoughts.columns import story_of
from cacheprobe.views.thoughts.picture import THOUGHT_COLUMNS, picture_of, thought_lines

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


class RunContent(NamedTuple):
    """Holds what the parts of a report read of one run, each made once."""

    trace: "Trace"
    events: pd.DataFrame
    texts: dict[int, str]
    """Of tokens, by id."""
    readings: pd.DataFrame | None
    """Of `lens_readings(trace, include_rolled_back=True)`; None for a run without."""
    lines: Mapping[int, np.ndarray]
    """Places of the lines of each request in `readings`."""
    notes: pd.DataFrame
    """Of `trace.notes.table()`, without those of an earlier run."""
    dashboard: str = ""
    """Address of a dashboard that shows the run, up to "run=N"; "" for a report without links to one."""

    @classmethod
    def of(cls, trace: "Trace", dashboard: str = "") -> "RunContent":
        """Returns the content of a trace. Raises: NoteError if the run's file of notes cannot be read."""
        readings = None
        with suppress(ValueError):  # none was recorded, and none can be made now
            readings = lens_readings(trace, include_rolled_back=True)
        lines = {} if readings is None else readings.groupby("request_id").indices
        notes = trace.notes.table()
        texts = token_texts(trace.row_table, trace.hypothesis_table)
        return cls(trace, trace.events(), texts, readings, lines, notes[notes.is_of_run], dashboard)

    def place(self, request_id: int, step: int | None = None, position: int | None = None) -> Link | None:
        """Returns a link to a place in the dashboard; None for a report without one. position: of a token."""
        if not self.dashboard:
            return None
        query = f"&request={request_id}" + (f"&step={step}" if step is not None else "")
        query += f"&position={position - 1}" if position is not None else ""
        return Link("dashboard", f"{self.dashboard}{query}&tab=replay")


def section_id(request_id: int) -> str:
    """Returns the id of the HTML element that begins a request's part of the report."""
    return f"request-{request_id}"


def request_section(content: RunContent, request_id: int) -> str:
    """Returns HTML of one request, which begins with an <h2>."""
    trace, events = content.trace, content.events
    readings = content.readings
    own = content._replace(
        events=events[events.request_id == request_id],
        readings=None if readings is None else readings.iloc[content.lines.get(request_id, [])],
        notes=content.notes[content.notes.request_id == request_id],
    )
    if own.events.empty:
        return f"<h2>Request {request_id} never began</h2>"
    is_deterministic = trace.requests[request_id].is_deterministic
    kind = "Not deterministic: nothing is promised about the bits of its states."
    if is_deterministic:
        kind = "Deterministic: its tokens and states do not depend on the other requests."
    place = content.place(request_id)
    links = f" {link(Link('All requests', '#requests'))}{f' · {link(place)}' if place else ''}"
    about = f"<p class='note'>{kind}{links}</p>{_notes_on_request(own)}"
    text = _text(own, request_id).replace("</h2>", f"</h2>{about}", 1)
    return "".join([text, *(part(own, request_id) for part in (_windows, _thoughts, _lens))])


def _notes_on_request(own: RunContent) -> str:
    whole = own.notes[own.notes.position.isna()]
    return "".join(f"<p class='written'>{markup(text or 'pinned')}</p>" for text in whole.text)


def _text(own: RunContent, request_id: int) -> str:
    prompt = tuple(text_of(own.texts, token_id) for token_id in own.trace.requests[request_id].prompt_token_ids)
    readings = None if own.readings is None else own.readings[~own.readings.status.isin(DISCARDED_DRAFT)]
    parts = text_parts(request_id, prompt, len(prompt), own.events, readings, own.trace.thought_table)
    of_tokens = own.notes[own.notes.position.notna()]
    noted = dict(zip(of_tokens.position.tolist(), of_tokens.text.tolist(), strict=True))
    return text_piece(parts._replace(noted=noted), own.texts, "verdict").html


def _windows(own: RunContent, request_id: int) -> str:
    diagrams = report_windows(own.trace, request_id, own.texts)
    if (decoded := diagrams.get("decoded")) is not None:
        note = f"Request {request_id} is never verified: it has no windows."
        return f"<p class='note'>{note}</p>{decoded.body}{decoded.legend}"
    num_windows = len(find_windows(own.events, request_id))
    drafted, accepted, *_ = verified_drafts(own.events)
    note = (
        f"<p class='note'>Request {request_id} went through {counted(num_windows, 'verify pass')}; "
        f"{accepted} of its {counted(drafted, 'draft token')} {'was' if accepted == 1 else 'were'} accepted. "
        "Below, the window with the longest draft that was accepted whole and one that was rolled back, if there are "
        "any. T′ is a draft token, T the verifier's own token at that place.</p>"
    )
    parts, absent = [], []
    for kind in ("accepted whole", "rolled back"):
        if (diagram := diagrams.get(kind.replace(" ", "-"))) is None:
            absent.append(f"No window of request {request_id} was {kind}.")
        else:
            parts.append(f"<h3>{kind.capitalize()}: {diagram.finding}</h3>{diagram.body}")
    without = f"<p class='note'>{' '.join(absent)}</p>" if absent else ""
    return "".join([note, *parts, without, *(diagram.legend for diagram in list(diagrams.values())[:1])])


def _thoughts(own: RunContent, request_id: int) -> str:
    """Returns HTML of the thoughts of a request; "" for a run without thoughts."""
    trace = own.trace
    if trace.thought_table is None:
        return ""
    thoughts = trace.thoughts()
    if request_id not in set(thoughts.request_id):
        return f"<p class='note'>Request {request_id} wrote no thoughts.</p>"
    note = (
        "The prompt in chunks, from its tokens upwards. S is added to a chunk at L<sup>in</sup>; T writes the thought "
        "Z from what the blocks made of the chunk, at L<sup>out</sup>; C makes of Z the S of the next chunk. A narrow "
        "screen scrolls the picture sideways."
    )
    story = story_of(thoughts, trace.row_table, own.events, request_id, own.texts)
    picture = picture_of(story, trace.ledger(request_id), trace.meta["thinking"])
    numbers = table(THOUGHT_COLUMNS, thought_lines(story))
    drawn = block(f"{section_id(request_id)}-thoughts", picture, f"{note} {picture.note}")
    return f"{drawn}<details><summary>The thoughts of request {request_id} in numbers</summary>{numbers}</details>"


def _lens(own: RunContent, request_id: int) -> str:
    """Returns HTML of the lens grid; "" for a run without readings."""
    if own.readings is None:
        return ""
    grids = report_grids(own.trace, request_id, own.readings, has_tips=False)
    if not grids:
        return f"<p class='note'>No lens reading of request {request_id} was kept.</p>"
    # the grid of all rows, if there are other rows, has those of the other one
    name, grid = list(grids.items())[-1]
    note = f"{grid.note} The colour is the log-probability that the layer gave to the token committed next. "
    note += "A narrow screen scrolls the grid sideways."
    if (count := len(own.trace.committed(request_id))) > MOST_POSITIONS:
        note += f" The first {MOST_POSITIONS} of {count} positions are shown."
    if len(grids) > 1:
        note += (
            " Columns of their own: rows that the verifier computed again (◇), rows that were fed a rejected token "
            "(✗), and rows whose draft was abandoned without a verdict (⊘). No committed token can be compared with "
            "rows of the last two kinds: their cells are grey."
        )
    return block(f"{section_id(request_id)}-{name}", grid, note)
