"""Draws the figures of a request's report, each under a name, and writes them as files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from cacheprobe.analysis.measures import lens_readings, prediction_depth
from cacheprobe.core.files import write_whole
from cacheprobe.core.progress import Progress
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.views.curves import draft_verdicts, prediction_depth_figure
from cacheprobe.views.diagrams.diagram import decoded_phases, keys, window_phases
from cacheprobe.views.diagrams.frame import Drawing, Panel, panels_alone
from cacheprobe.views.diagrams.lens_grid import LensGrid, grid_of
from cacheprobe.views.diagrams.windows import Window, accepted_whole, find_windows, pick_request, rolled_back
from cacheprobe.views.images import FORMATS, image, require_browser, svg_image
from cacheprobe.views.text import token_texts
from cacheprobe.views.thoughts.columns import story_of
from cacheprobe.views.thoughts.picture import thoughts_alone

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
        for name, content in _contents(figures, drawings, kind):
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


def report_grids(trace: "Trace", request_id: int) -> dict[str, LensGrid]:
    """Returns a dict from name to `LensGrid` (a drawn grid of lens readings), of one request at the positions of
    `shown_positions` (at most 48). "lens-grid" has the committed rows. "lens-grid-all" has all rows, and is left out if
    no row was fed a rejected or given-up draft token. Returns {} if no committed row at these positions has a
    reading."""
    if trace.hypothesis_table is None:
        return {}
    readings, (shown, _) = lens_readings(trace, include_rolled_back=True), shown_positions(trace, request_id)
    readings_shown = readings[(readings.request_id == request_id) & readings.position.isin(shown)]
    grids = {}
    if (readings_shown.status == "committed").any():
        grids["lens-grid"] = grid_of(readings, request_id, positions=shown, include="committed")
        if readings_shown.status.isin(DISCARDED_DRAFT).any():
            grids["lens-grid-all"] = grid_of(readings, request_id, positions=shown, include="all")
    return grids


def shown_positions(trace: "Trace", request_id: int) -> tuple[range, int]:
    """Returns (positions, count): the positions that the report's lens grid shows, at most 48, and the number of
    generated tokens. The rows at these positions predict the first generated tokens."""
    first = len(trace.requests[request_id].prompt_token_ids) - 1
    count = len(trace.committed(request_id))
    return range(first, first + min(count, MOST_POSITIONS)), count


def report_drawings(trace: "Trace", request_id: int) -> dict[str, Drawing]:
    """Returns a dict from name to `Drawing` (an SVG file) for one request: its verify windows "accepted-whole" and
    "rolled-back", or "decoded" if the request was never verified; "thoughts"; "lens-grid" and "lens-grid-all".
    Names without a picture are left out."""
    events, texts = trace.events(), token_texts(trace.row_table, trace.hypothesis_table)
    drawings = {
        name: panels_alone(f"Request {request_id}, {title}", panels, keys())
        for name, title, panels in report_panels(trace, request_id, texts)
    }
    if trace.thought_table is not None and (trace.thought_table.request_id == request_id).any():
        story = story_of(trace.thoughts(), trace.row_table, events, request_id, texts)
        drawings["thoughts"] = thoughts_alone(story, trace.ledger(request_id), trace.meta["thinking"])
    return {**drawings, **{name: grid.drawing for name, grid in report_grids(trace, request_id).items()}}


def report_panels(trace: "Trace", request_id: int, texts: dict[int, str]) -> Iterator[tuple[str, str, list[Panel]]]:
    """Yields (name, title, list of `Panel`: one drawn phase each) for the best verify windows of one request:
    "accepted-whole", whose draft was accepted whole, and "rolled-back", with a rollback. A name without an example is
    left out.

    For a request without verify windows, yields ("decoded", title, list of Panel), unless no token was committed.
    Raises: ValueError for a request without events.
    """
    events = trace.events()
    windows = find_windows(events, request_id)
    if not windows and events.committed_token_ids[events.request_id == request_id].map(len).any():
        prefills = events[(events.request_id == request_id) & (events.phase == "prefill")]
        ledgers = [trace.ledger(request_id, int(prefills.step.max())), trace.ledger(request_id)]
        yield "decoded", "never verified", decoded_phases(request_id, events, ledgers, texts)
    is_deterministic = trace.requests[request_id].is_deterministic
    for name, pick in (("accepted-whole", accepted_whole), ("rolled-back", rolled_back)):
        if (window := pick(windows)) is not None:
            ledgers = [trace.ledger(request_id, step) for step in window.ledger_steps]
            panels = window_phases(window, events, ledgers, texts, is_deterministic=is_deterministic)
            yield name, f"{name.replace('-', ' ')}: {span(window)}", panels


def span(window: Window) -> str:
    """Returns text that names the positions of a window's input tokens, such as "positions 12 to 16"; both ends
    count."""
    return f"positions {window.start - 1} to {window.start + len(window.target_token_ids) - 2}"


def _contents(figures: dict[str, go.Figure], drawings: dict[str, Drawing], kind: str) -> Iterator[tuple[str, bytes]]:
    """Yields (name, bytes of a file of this kind) for each drawing and each plotly figure."""
    for name, drawing in drawings.items():
        if kind == "svg":
            yield name, drawing.markup.encode()
        else:
            yield name, svg_image(*drawing, kind)
    for name, figure in figures.items():
        yield name, image(figure, kind)
