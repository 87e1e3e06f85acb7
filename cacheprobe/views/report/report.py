"""Writes the report, one HTML page about one request of a run, and its figures as files."""

from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from cacheprobe.analysis.measures import lens_readings, prediction_depth
from cacheprobe.core.files import write_whole
from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.terminal import DASH_PORT, Progress
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import UNREAD
from cacheprobe.trace.tables.draft_verdicts import verified_drafts
from cacheprobe.views.curves import draft_verdicts, prediction_depth_figure
from cacheprobe.views.diagrams.diagram import decoded_diagram, window_diagram
from cacheprobe.views.diagrams.frame import Drawing, Markup
from cacheprobe.views.diagrams.lens_grid import grid_of
from cacheprobe.views.diagrams.windows import accepted_whole, find_windows, pick_request, rolled_back
from cacheprobe.views.images import FORMATS, image, require_browser, svg_image
from cacheprobe.views.rejected import rejections_section
from cacheprobe.views.report.insight import drafts_sentence, first_insight
from cacheprobe.views.report.page import block, figure_block, page, table, with_contents
from cacheprobe.views.report.request_text import text_parts, text_piece
from cacheprobe.views.text import counted, markup, text_of, token_texts
from cacheprobe.views.thoughts.columns import finding as thoughts_finding
from cacheprobe.views.thoughts.columns import story_of
from cacheprobe.views.thoughts.picture import THOUGHT_COLUMNS, picture_of, thought_lines

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def write_report(trace: "Trace", path: "str | Path", request_id: int | None = None, *, progress: bool = False) -> Path:
    """Writes the report of one request as an HTML page to `path`, and returns the path. After an error the file is
    unchanged.

    request_id: by default one with both a draft accepted whole and a rollback, if any request has both.
    progress: show the progress on stderr.
    Raises: KeyError for a request that the trace does not have; ValueError for a request without events.
    """
    path = Path(path)
    if request_id is None:
        request_id = pick_request(trace.events())
    html = report_html(trace, request_id, progress=progress)
    return write_whole(path, lambda beside: beside.write_text(html, encoding="utf-8", errors="replace"))


def report_html(trace: "Trace", request_id: int, *, progress: bool = False) -> str:
    """Returns the report of one request as one HTML document that needs no network. Raises: KeyError for a request that
    the trace does not have; ValueError for a request without events."""
    if request_id not in trace.tokens:
        raise KeyError(f"no request {request_id} in this trace; it has {sorted(trace.tokens)}")
    texts = token_texts(trace.row_table, trace.hypothesis_table)
    sections, parts = (_head, _prompt, _windows, _thoughts, _rejections, _lens, _controls), []
    with Progress(len(sections), "drawing", "sections", enabled=progress) as bar:
        for section in sections:
            parts.append(section(trace, request_id, texts))
            bar.advance()
    body = with_contents(parts[0], list(filter(None, parts[1:])))
    return page(f"cacheprobe: request {request_id} of {len(trace.requests)}", body)


def _head(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    lead = [run_sentence(trace, request_id), *behaviour_sentences(trace.meta["behaviour"])]
    if to_see := _first_thing_to_see(trace, request_id, texts):
        lead.append(f"<strong>One thing to see:</strong> {markup(to_see)}{'' if to_see.endswith('…') else '.'}")
    paragraphs = "".join(f"<p class='lead'>{sentence}</p>" for sentence in lead)
    # a report does not know its own directory, nor whether a dashboard runs
    address = f"http://127.0.0.1:{DASH_PORT}/?run=0&amp;request={request_id}"
    dashboard = (
        "In the dashboard every token can be chosen: start <code>cacheprobe dash RUN</code> with the directory of "
    )
    dashboard += f'this run, then open <a href="{address}">{address}</a>.'
    head = f"<h1>What the model believed before it committed</h1>{paragraphs}"
    return f"{head}<p class='note'>{dashboard}</p>"


def _first_thing_to_see(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    """Returns a sentence as plain text on the request's thoughts, or else on a token of one of its verify passes; ""
    without either."""
    events = trace.events()
    if trace.thought_table is not None and (trace.thought_table.request_id == request_id).any():
        return thoughts_finding(story_of(trace.thoughts(), trace.row_table, events, request_id, texts))
    readings = None if trace.hypothesis_table is None else lens_readings(trace)
    return first_insight(readings, trace.row_table, events[events.request_id == request_id], texts)


def _prompt(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    prompt = tuple(text_of(texts, token_id) for token_id in trace.requests[request_id].prompt_token_ids)
    readings = None if trace.hypothesis_table is None else lens_readings(trace)
    parts = text_parts(request_id, prompt, len(prompt), trace.events(), readings, trace.thought_table)
    return text_piece(parts, texts, "verdict").html


def _windows(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    head, diagrams = "<h2>From draft to commit</h2>", report_windows(trace, request_id, texts)
    if (decoded := diagrams.get("decoded")) is not None:
        note = f"Request {request_id} is never verified: it has no windows. {_elsewhere(trace, request_id)}"
        return f"{head}<p class='note'>{note}</p>{decoded.body}{decoded.legend}"
    events = trace.events()
    num_windows = len(find_windows(events, request_id))
    drafted, accepted, *_ = verified_drafts(events[events.request_id == request_id])
    note = (
        f"<p class='note'>Request {request_id} went through {counted(num_windows, 'verify pass')}; "
        f"{accepted} of its {counted(drafted, 'draft token')} {'was' if accepted == 1 else 'were'} accepted. "
        "Below, the window with the longest draft that was accepted whole and one that was rolled back, if there are "
        "any. T′ is a draft token, T the verifier's own token at that place.</p>"
    )
    parts = [head, note]
    for kind in ("accepted whole", "rolled back"):
        diagram = diagrams.get(kind.replace(" ", "-"))
        absent = f"<p class='note'>No window of request {request_id} was {kind}. {_elsewhere(trace, request_id)}</p>"
        title, shown = ("none", absent) if diagram is None else (diagram.finding, diagram.body)
        parts.append(f"<h3>{kind.capitalize()}: {title}</h3>{shown}")
    return "".join([*parts, *(diagram.legend for diagram in list(diagrams.values())[:1])])


def _elsewhere(trace: "Trace", request_id: int) -> str:
    """Returns text that names the other requests with a draft accepted whole, and those with a rollback."""
    events = trace.events()
    requests_with_events = set(events.request_id)  # not one that was cancelled before it began
    windows = {r: find_windows(events, r) for r in trace.tokens if r != request_id and r in requests_with_events}
    sentences = []
    for kind, pick in (("accepted whole", accepted_whole), ("rolled back", rolled_back)):
        request_ids = [str(r) for r, windows_of_request in windows.items() if pick(windows_of_request)]
        sentences.append(f"Windows {kind} in other requests: {', '.join(request_ids) if request_ids else 'none'}.")
    return " ".join(sentences)


def _thoughts(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    """Returns HTML of the thoughts of a request; "" for a run without thoughts."""
    if trace.thought_table is None:
        return ""
    head = "<h2>What was thought of every chunk</h2>"
    thoughts = trace.thoughts()
    if request_id not in set(thoughts.request_id):
        request_ids = ", ".join(str(r) for r in sorted({int(r) for r in thoughts.request_id}))
        return f"{head}<p class='note'>Request {request_id} wrote no thoughts; requests that did: {request_ids}.</p>"
    note = (
        "<p class='note'>The prompt in chunks, from its tokens upwards. S is added to a chunk at L<sup>in</sup>; T "
        "writes the thought Z from what the blocks made of the chunk, at L<sup>out</sup>; C makes of Z the S of the "
        "next chunk. A narrow screen scrolls the picture sideways.</p>"
    )
    story = story_of(thoughts, trace.row_table, trace.events(), request_id, texts)
    picture = picture_of(story, trace.ledger(request_id), trace.meta["thinking"])
    numbers = table(THOUGHT_COLUMNS, thought_lines(story))
    drawn = block("thoughts", picture, picture.note)
    return f"{head}{note}{drawn}<details><summary>The same in numbers</summary>{numbers}</details>"


def _rejections(trace: "Trace", _request_id: int, _texts: dict[int, str]) -> str:
    return rejections_section(trace)


def _lens(trace: "Trace", request_id: int, _texts: dict[int, str]) -> str:
    if trace.hypothesis_table is None:
        note = "This run read no lens; with <code>Z</code> among the captured sites it does."
        return f"<h2>Lens readings</h2><p class='note'>{markup(f'{UNREAD}.') if trace.is_unread else note}</p>"
    parts, grids = ["<h2>Every layer beside what was committed</h2>"], report_grids(trace, request_id)
    if not grids:
        parts.append(f"<p class='note'>No lens reading of request {request_id} was kept.</p>")
    else:  # the grid of all rows, where there are other rows, has those of the other one
        name, grid = list(grids.items())[-1]
        note = f"{grid.note} The colour is the log-probability that the layer gave to the token committed next. "
        note += "A narrow screen scrolls the grid sideways."
        if (count := len(trace.committed(request_id))) > MOST_POSITIONS:
            note += f" The first {MOST_POSITIONS} of {count} positions are shown."
        if len(grids) > 1:
            note += (
                " Columns of their own: rows that the verifier computed again (◇), rows that were fed a rejected token "
                "(✗), and rows whose draft was abandoned without a verdict (⊘). No committed token can be compared "
                "with rows of the last two kinds: their cells are grey."
            )
        parts.append(block(name, grid, note))
    notes = {
        "drafts": "Whole run, one reading for each row of a position where a draft was judged. Rows that were fed a "
        "rejected token are left out: they follow a text that was never committed.",
        "prediction_depth": "Whole run. Prediction depth: the layer from which the first choice no longer changes.",
    }
    run_figures = "".join(figure_block(figure, name, notes[name]) for name, figure in report_figures(trace).items())
    return "".join(parts) + f'<div class="two">{run_figures}</div>'


def _controls(trace: "Trace", _request_id: int, _texts: dict[int, str]) -> str:
    names = ("name", "dtype", "tolerance", "num_rows")
    checks = [[*(check[name] for name in names), float(check["worst"])] for check in trace.meta["checks"]]
    columns = ["check", "dtype", "tolerance", "rows", "worst, as a share of the tolerance"]
    checks_table = table(columns, checks) if checks else "<p class='note'>This run made no checks.</p>"
    fingerprint = table(["setting", "value"], [[name, str(value)] for name, value in trace.fingerprint.items()])
    return (
        "<h2>Controls</h2><p class='note'>Identities that the captured states were held to while the run went on.</p>"
        f"{checks_table}<details><summary>Schedule fingerprint: what the bits of this run depend on</summary>"
        f"{fingerprint}</details>"
    )


def run_sentence(trace: "Trace", request_id: int) -> str:
    """Returns sentences as HTML on a run: the model, the numbers of requests and steps, the numbers of accepted and
    rolled-back draft tokens, and whether this request is deterministic."""
    fingerprint, note = trace.fingerprint, trace.meta["weights_note"]
    phases = trace.event_table.drop_duplicates("step").phase.value_counts()
    steps = ", ".join(f"{int(phases.get(phase, 0))} {phase}" for phase in ("prefill", "decode", "verify"))
    count = len(trace.requests)
    sentences = f"<code>{markup(fingerprint['model'])}</code>{f' ({markup(note)})' if note else ''} "
    sentences += f"in {markup(fingerprint['dtype'])} answered {counted(count, 'request')} "
    sentences += f"in {int(phases.sum())} steps ({steps}). "
    drafter = trace.meta["drafter"]
    sentences += drafts_sentence(f"<code>{markup(drafter)}</code>" if drafter else "", trace.event_table) + " "
    sentences += f"In short, {trace.draft_line}. " if trace.draft_line else ""
    kind = "not deterministic: nothing is promised about the bits of its states"
    if trace.requests[request_id].is_deterministic:
        kind = "deterministic: its tokens and states do not depend on the other requests"
    return sentences + f"This page follows request {request_id}, which is {kind}."


def behaviour_sentences(behaviour: JsonDict | None) -> list[str]:
    """Returns a list of one or two texts as HTML: the model's accuracy in its task, and a warning unless the lower end
    of its 95 % interval is above chance; [] without a task. behaviour: meta["behaviour"] of the trace."""
    if not behaviour:
        return []
    b = behaviour
    accuracy_sentence = (
        f"Task: {_percent(b['accuracy'])} of {b['num_examples']} answers are right (95 % interval "
        f"{_percent(b['accuracy_low'])} to {_percent(b['accuracy_high'])}), chance is {_percent(b['chance'])}; "
        f"{b['num_unparsed']} gave no answer that can be read. The answer words hold {_percent(b['answer_mass'], 1)} "
        f"of the first token's probability; forced to choose between them, {_percent(b['forced_accuracy'])} are right."
    )
    warning = "Not above chance: this model does not solve the task, and nothing here is said about “its state”."
    low, chance = b["accuracy_low"], b["chance"]
    is_above_chance = low is not None and chance is not None and low > chance
    return [accuracy_sentence] if is_above_chance else [accuracy_sentence, f"<strong>{warning}</strong>"]


def _percent(share: float | None, digits: int = 0) -> str:
    return "unknown" if share is None else f"{share:.{digits}%}"


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


def report_grids(trace: "Trace", request_id: int) -> dict[str, Markup]:
    """Returns a dict from name to a lens grid of one request at the positions that predict its first 48 generated
    tokens. "lens-grid" has the committed rows. "lens-grid-all" has all rows, and is left out if no row was fed a
    rejected or abandoned draft token. Returns {} if no committed row at these positions has a reading."""
    if trace.hypothesis_table is None:
        return {}
    first = len(trace.requests[request_id].prompt_token_ids) - 1
    shown = range(first, first + min(len(trace.committed(request_id)), MOST_POSITIONS))
    readings = lens_readings(trace, include_rolled_back=True)
    status = readings.status[(readings.request_id == request_id) & readings.position.isin(shown)]
    if not (status == "committed").any():
        return {}
    grids = {"lens-grid": grid_of(readings, request_id, positions=shown)}
    if status.isin(DISCARDED_DRAFT).any():
        grids["lens-grid-all"] = grid_of(readings, request_id, positions=shown, include="all")
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
