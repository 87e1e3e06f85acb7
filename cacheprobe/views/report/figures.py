"""Draws the figures of one request of a run, for its part of the report and as files."""

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.analysis.measures import lens_readings, prediction_depth
from cacheprobe.analysis.windows import accepted_whole, find_windows, pick_request, rolled_back
from cacheprobe.core.files import write_whole
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.terminal import Progress
from cacheprobe.views.curves import draft_verdicts, prediction_depth_figure
from cacheprobe.views.diagrams.diagram import decoded_diagram, window_diagram
from cacheprobe.views.diagrams.frame import Drawing, Markup
from cacheprobe.views.diagrams.lens_grid import grid_of
from cacheprobe.views.images import FORMATS, image, require_browser, svg_image
from cacheprobe.views.text import token_texts
from cacheprobe.views.thoughts.columns import story_of
from cacheprobe.views.thoughts.picture import picture_of

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

MOST_POSITIONS = 48
"""Largest number of positions of the lens grid in a report; each column costs the browser a cell for every layer."""


def write_figures(
    trace: "Trace", directory: "str | Path", kind: str = "png", request_id: int | None = None, *, progress: bool = True
) -> list[Path]:
    """Writes the figures of one request's report, each as a file DIRECTORY/NAME.KIND, and returns a list of the paths.
    An error leaves no partial file; files written before it stay.

    kind: "png", "svg" or "pdf".  request_id: by default the report's, from `pick_request`.
    Raises, before anything is written: ValueError for another kind, KeyError for a request that the trace does not
    have, ValueError for a request without events, ImageError if kaleido or a Chromium is missing. A run without lens
    readings needs neither for SVG.
    """
    if kind not in FORMATS:
        raise ValueError(f"unknown format {kind!r} of figures; choose one of {', '.join(FORMATS)}")
    request_id = pick_request(trace.events()) if request_id is None else request_id
    trace.committed(request_id)
    figures, drawings = report_figures(trace), report_drawings(trace, request_id)
    if figures or kind != "svg":
        require_browser()
    written = []
    with Progress(len(figures) + len(drawings), "drawing", "figures", enabled=progress) as bar:
        for name, drawn in (drawings | figures).items():
            if isinstance(drawn, go.Figure):
                content = image(drawn, kind)
            else:
                content = drawn.markup.encode() if kind == "svg" else svg_image(*drawn, kind)
            path = Path(directory) / f"{name}.{kind}"
            written.append(write_whole(path, lambda beside, content=content: beside.write_bytes(content)))
            bar.advance(note=path.name)
    return written


def report_figures(trace: "Trace") -> dict[str, go.Figure]:
    """Returns a dict from name to plotly figure, drawn from the lens readings of the whole run: "drafts" and
    "prediction_depth"; {} for a run without lens readings."""
    if trace.hypothesis_table is None:
        return {}
    drafts = draft_verdicts(lens_readings(trace, include_rolled_back=True))
    return {"drafts": drafts, "prediction_depth": prediction_depth_figure(prediction_depth(trace))}


def report_grids(
    trace: "Trace", request_id: int, readings: pd.DataFrame | None = None, *, has_tips: bool = True
) -> dict[str, Markup]:
    """Returns a dict from name to a lens grid of one request at the positions that predict its first 48 generated
    tokens. "lens-grid" has the committed rows. "lens-grid-all" has all rows, and is left out if no row was fed a
    rejected or abandoned draft token. Returns {} if no committed row at these positions has a reading.

    readings: of `lens_readings(trace, include_rolled_back=True)`, at least those of the request; None reads them.
    has_tips: as in `grid_of`.
    """
    if trace.hypothesis_table is None:
        return {}
    first = len(trace.requests[request_id].prompt_token_ids) - 1
    shown = range(first, first + min(len(trace.committed(request_id)), MOST_POSITIONS))
    readings = lens_readings(trace, include_rolled_back=True) if readings is None else readings
    status = readings.status[(readings.request_id == request_id) & readings.position.isin(shown)]
    if not (status == "committed").any():
        return {}
    grids = {"lens-grid": grid_of(readings, request_id, positions=shown, has_tips=has_tips)}
    if status.isin(DISCARDED_DRAFT).any():
        every = grid_of(readings, request_id, positions=shown, include="all", has_tips=has_tips)
        grids["lens-grid-all"] = every
    return grids


def report_drawings(trace: "Trace", request_id: int) -> dict[str, Drawing]:
    """Returns a dict from name to `Drawing` (an SVG file) for one request: its verify windows "accepted-whole" and
    "rolled-back", or "decoded" if the request was never verified; "thoughts"; "lens-grid" and "lens-grid-all".
    Names without a picture are left out."""
    events, texts = trace.events(), token_texts(trace.row_table, trace.hypothesis_table)
    pictures = report_windows(trace, request_id, texts)
    if trace.thought_table is not None and (trace.thought_table.request_id == request_id).any():
        story = story_of(trace.thoughts(), trace.row_table, events, request_id, texts)
        pictures["thoughts"] = picture_of(story, trace.ledger(request_id), trace.meta["thinking"])
    pictures |= report_grids(trace, request_id)
    return {name: picture.draw() for name, picture in pictures.items() if picture.draw is not None}


def report_windows(trace: "Trace", request_id: int, texts: dict[int, str]) -> dict[str, Markup]:
    """Returns a dict from name to diagram of up to two verify windows of one request. "accepted-whole": the longest
    draft that was accepted whole. "rolled-back": a window with a rollback; a partly accepted draft is preferred, then
    the longest. A name without an example is left out.

    For a request without verify windows: "decoded", unless no token was committed.
    Raises: ValueError for a request without events.
    """
    events = trace.events()
    windows = find_windows(events, request_id)
    if not windows and events.committed_token_ids[events.request_id == request_id].map(len).any():
        prefills = events[(events.request_id == request_id) & (events.phase == "prefill")]
        ledgers = [trace.ledger(request_id, int(prefills.step.max())), trace.ledger(request_id)]
        return {"decoded": decoded_diagram(request_id, events, ledgers, texts)}
    is_deterministic = trace.requests[request_id].is_deterministic
    diagrams = {}
    for name, pick in (("accepted-whole", accepted_whole), ("rolled-back", rolled_back)):
        if (window := pick(windows)) is not None:
            ledgers = [trace.ledger(request_id, step) for step in window.ledger_steps]
            diagrams[name] = window_diagram(window, events, ledgers, texts, is_deterministic=is_deterministic)
    return diagrams
