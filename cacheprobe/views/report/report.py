"""Writes the report: one HTML page about one request of a run."""

from pathlib import Path
from typing import TYPE_CHECKING

from cacheprobe.analysis.measures import lens_readings
from cacheprobe.core.files import write_whole
from cacheprobe.core.progress import Progress
from cacheprobe.core.terminal import DASH_PORT
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import UNREAD
from cacheprobe.trace.tables.draft_verdicts import verified_drafts
from cacheprobe.views.diagrams.diagram import legend, side_by_side
from cacheprobe.views.diagrams.windows import accepted_whole, find_windows, pick_request, rolled_back
from cacheprobe.views.lens_table import BELOW
from cacheprobe.views.report.figures import report_figures, report_grids, report_panels, shown_positions
from cacheprobe.views.report.insight import drafts_sentence, first_insight
from cacheprobe.views.report.page import block, figure_block, page, table, with_contents
from cacheprobe.views.report.rejections import rejections_section
from cacheprobe.views.report.request_text import text_parts, text_piece
from cacheprobe.views.text import markup, text_of, token_texts
from cacheprobe.views.thoughts.columns import finding as thoughts_finding
from cacheprobe.views.thoughts.columns import story_of
from cacheprobe.views.thoughts.picture import THOUGHT_COLUMNS, thought_lines, thoughts_block

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
    has_lens, has_thoughts = trace.hypothesis_table is not None, trace.thought_table is not None
    texts = token_texts(trace.row_table, trace.hypothesis_table)
    sections = [
        lambda: _head(trace, request_id, texts),
        lambda: _prompt(trace, request_id, texts),
        lambda: _windows(trace, request_id, texts),
        *([lambda: _thoughts(trace, request_id, texts)] if has_thoughts else []),
        lambda: rejections_section(trace),
        lambda: _lens(trace, request_id) if has_lens else _no_lens(trace),
        lambda: _controls(trace),
    ]
    parts = []
    with Progress(len(sections), "drawing", "sections", enabled=progress) as bar:
        for section in sections:
            parts.append(section())
            bar.advance()
    return page(f"cacheprobe: request {request_id} of {len(trace.requests)}", with_contents(parts[0], parts[1:]))


def _head(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    lead = [run_sentence(trace, request_id), *behaviour_sentences(trace.meta["behaviour"])]
    if to_see := _first_thing_to_see(trace, request_id, texts):
        lead.append(f"<strong>One thing to see:</strong> {markup(to_see)}{'' if to_see.endswith('…') else '.'}")
    paragraphs = "".join(f"<p class='lead'>{sentence}</p>" for sentence in lead)
    paragraphs += _to_the_dashboard(request_id)
    return f"<h1>What the model believed before it committed</h1>{paragraphs}"


def _to_the_dashboard(request_id: int) -> str:
    """Returns HTML: how to open the request in the dashboard. A report does not know its own directory, nor whether a
    dashboard runs."""
    address = f"http://127.0.0.1:{DASH_PORT}/?run=0&amp;request={request_id}"
    return (
        "<p class='note'>In the dashboard every token can be chosen: start <code>cacheprobe dash RUN</code> with the "
        f'directory of this run, then open <a href="{address}">{address}</a>.</p>'
    )


def _first_thing_to_see(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    """Returns a sentence as plain text on the request's thoughts, or else on a token of one of its verify passes; ""
    without either."""
    events = trace.events()
    if trace.thought_table is not None and (trace.thought_table.request_id == request_id).any():
        return thoughts_finding(story_of(trace.thoughts(), trace.row_table, events, request_id, texts))
    readings = None if trace.hypothesis_table is None else lens_readings(trace)
    return first_insight(readings, trace.row_table, events[events.request_id == request_id], texts)


def _no_lens(trace: "Trace") -> str:
    """Returns HTML: why the report has no lens readings."""
    note = "This run read no lens; with <code>Z</code> among the captured sites it does."
    return f"<h2>Lens readings</h2><p class='note'>{markup(f'{UNREAD}.') if trace.is_unread else note}</p>"


def _prompt(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    prompt = tuple(text_of(texts, token_id) for token_id in trace.requests[request_id].prompt_token_ids)
    readings = None if trace.hypothesis_table is None else lens_readings(trace)
    parts = text_parts(request_id, prompt, len(prompt), trace.events(), readings, trace.thought_table)
    return text_piece(parts, texts, "verdict").html


def _windows(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    windows, events = find_windows(trace.events(), request_id), trace.events()
    head = "<h2>From draft to commit</h2>"
    panels_by_name = {
        name: (title, side_by_side(panels)) for name, title, panels in report_panels(trace, request_id, texts)
    }
    if "decoded" in panels_by_name:
        note = f"Request {request_id} is never verified: it has no windows. {_elsewhere(trace, request_id)}"
        return f"{head}<p class='note'>{note}</p>" + legend() + panels_by_name["decoded"][1]
    drafted, accepted, *_ = verified_drafts(events[events.request_id == request_id])
    note = (
        f"<p class='note'>Request {request_id} went through {len(windows)} verify pass{'es' * (len(windows) != 1)}; "
        f"{accepted} of its {drafted} draft token{'s' * (drafted != 1)} {'was' if accepted == 1 else 'were'} accepted. "
        "Below, the window with the longest draft that was accepted whole and one that was rolled back, if there are "
        "any. T′ is a draft token, T the verifier's own token at that place.</p>"
    )
    parts = [head, note, legend()]
    for kind in ("accepted whole", "rolled back"):
        title, panels = panels_by_name.get(kind.replace(" ", "-"), (f"{kind}: none", ""))
        absent = f"<p class='note'>No window of request {request_id} was {kind}. {_elsewhere(trace, request_id)}</p>"
        parts.append(f"<h3>{title.capitalize()}</h3>{panels or absent}")
    return "".join(parts)


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
    block = thoughts_block(story, trace.ledger(request_id), trace.meta["thinking"])
    numbers = table(THOUGHT_COLUMNS, thought_lines(story))
    return f"{head}{note}{block}<details><summary>The same in numbers</summary>{numbers}</details>"


def _lens(trace: "Trace", request_id: int) -> str:
    shown, count = shown_positions(trace, request_id)
    figures, grids = report_figures(trace), report_grids(trace, request_id)
    how_many = f" The first {len(shown)} of {count} positions are shown." if len(shown) < count else ""
    notes = {
        "lens-grid": "Every block's residual stream, read through the "
        f"{markup(trace.meta['lens'])} lens: the cell names its first choice, the colour is the log-probability "
        f"that it gave to the token committed next. Below a column: {BELOW}. "
        f"A narrow screen scrolls the grid sideways.{how_many}",
        "lens-grid-all": "Columns of their own: rows that the verifier computed again (◇), rows that were fed a "
        "rejected token (✗), and rows whose draft was given up without a verdict (⊘). No committed token can be "
        "compared with rows of the last two kinds: their cells are grey.",
        "drafts": "Whole run, one reading for each row of a position where a draft was judged. Rows that were fed a "
        "rejected token are left out: they follow a text that was never committed.",
        "prediction_depth": "Whole run. Prediction depth: the layer from which the first choice no longer changes.",
    }

    parts = ["<h2>Every layer beside what was committed</h2>"]
    if not grids:
        parts.append(f"<p class='note'>No lens reading of request {request_id} was kept.</p>")
    else:  # the grid of all rows, where there are other rows, has those of the other one
        name, note = list(grids)[-1], " ".join(notes[name] for name in grids)
        parts.append(block(name, grids[name].title, note, grids[name].html))
    run_figures = "".join(figure_block(figure, name, notes[name]) for name, figure in figures.items())
    return "".join(parts) + f'<div class="two">{run_figures}</div>'


def _controls(trace: "Trace") -> str:
    checks = [
        [check["name"], check["dtype"], check["tolerance"], check["num_rows"], float(check["worst"])]
        for check in trace.meta["checks"]
    ]
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
    sentences = (
        f"<code>{markup(fingerprint['model'])}</code>{f' ({markup(note)})' if note else ''} "
        f"in {markup(fingerprint['dtype'])} "
        f"answered {count} request{'s' * (count != 1)} in {int(phases.sum())} steps ({steps}). "
    )
    drafter = trace.meta["drafter"]
    sentences += drafts_sentence(f"<code>{markup(drafter)}</code>" if drafter else "", trace.event_table) + " "
    kind = "deterministic: its tokens and states do not depend on the other requests" if (
        trace.requests[request_id].is_deterministic
    ) else "not deterministic: nothing is promised about the bits of its states"  # fmt: skip
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
    return [accuracy_sentence] if is_above_chance(b) else [accuracy_sentence, f"<strong>{warning}</strong>"]


def is_above_chance(behaviour: JsonDict) -> bool:
    """Returns True if the lower end of the accuracy's 95 % interval is above chance; False if either number is
    unknown."""
    low, chance = behaviour["accuracy_low"], behaviour["chance"]
    return low is not None and chance is not None and low > chance


def _percent(share: float | None, digits: int = 0) -> str:
    return "unknown" if share is None else f"{share:.{digits}%}"
