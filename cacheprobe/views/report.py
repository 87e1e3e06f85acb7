"""The report: one page about one request of a run, from the trace's own tables."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from cacheprobe.views.curves import agreement_figure, settling_figure
from cacheprobe.views.diagram import decoded_panels, legend, window_panels
from cacheprobe.views.lens_grid import grid_width, lens_grid
from cacheprobe.views.page import figure_block, page, table
from cacheprobe.views.prompt_block import prompt_block
from cacheprobe.views.prose import behaviour_sentences, run_sentence
from cacheprobe.views.text import markup, token_texts
from cacheprobe.views.thoughts_columns import story_of
from cacheprobe.views.thoughts_picture import THOUGHT_COLUMNS, thought_lines, thoughts_block
from cacheprobe.views.windows import Window, accepted_whole, find_windows, pick_request, rolled_back

if TYPE_CHECKING:
    from cacheprobe.observe.trace import Trace

_MOST_POSITIONS = 48
"""Columns of the lens grid; each more costs the browser a cell for every layer."""


def write_report(trace: "Trace", path: "str | Path", request_id: int | None = None) -> Path:
    """Write the report of one request to `path`, whole or not at all.

    request_id: by default one that shows both a window accepted whole and one rolled back, if any does.
    Raises: KeyError for a request that the trace does not have.
    """
    path = Path(path)
    if request_id is None:
        request_id = pick_request(trace.events())
    html = report_html(trace, request_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(html)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's file is its owner's alone; a report is to be shown
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def report_html(trace: "Trace", request_id: int) -> str:
    """The report as one HTML document that needs no network."""
    if request_id not in trace.tokens:
        raise KeyError(f"no request {request_id} in this trace; it has {sorted(trace.tokens)}")
    hypotheses = trace.hypothesis_table
    texts = token_texts(trace.row_table, hypotheses)
    title = f"cacheprobe: request {request_id} of {len(trace.requests)}"
    parts = [
        f"<h1>What the model believed before it committed</h1><p class='lead'>{run_sentence(trace, request_id)}</p>",
        *(f"<p class='lead'>{sentence}</p>" for sentence in behaviour_sentences(trace.meta["behaviour"])),
        _prompt(trace, request_id, texts),
        _windows(trace, request_id, texts),
        *([_thoughts(trace, request_id, texts)] if trace.thought_table is not None else []),
        _lens(trace, request_id) if hypotheses is not None else _NO_LENS,
        _controls(trace),
    ]
    return page(title, "\n".join(parts))


_NO_LENS = (
    "<h2>Lens readings</h2>"
    "<p class='note'>This run read no lens; with <code>Z</code> among the captured sites it does.</p>"
)


def _prompt(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    request = trace.requests[request_id]
    about = {"prompt": request.prompt, "prompt_token_ids": request.prompt_token_ids, "text": trace.text(request_id)}
    count = len(trace.committed(request_id))
    return (
        f"<h2>Prompt and answer of request {request_id}</h2>"
        f"<p class='note'>{len(request.prompt_token_ids)} prompt tokens; the {count} generated ones are marked.</p>"
        f"{prompt_block(about, texts)}"
    )


def _windows(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    events = trace.events()
    windows = find_windows(events, request_id)
    head = "<h2>From draft to commit</h2>"
    if not windows:
        own = events[(events.request_id == request_id) & (events.phase == "prefill")]
        ledgers = [trace.ledger(request_id, int(own.step.max())), trace.ledger(request_id)]
        said = f"Request {request_id} is never verified: it has no windows. {_elsewhere(trace, request_id)}"
        return f"{head}<p class='note'>{said}</p>" + legend() + decoded_panels(request_id, events, ledgers, texts)
    drafted = sum(len(window.draft_token_ids) for window in windows)
    accepted = sum(window.num_accepted for window in windows)
    note = (
        f"<p class='note'>Request {request_id} went through {len(windows)} verify passes; {accepted} of its {drafted} "
        "candidates were accepted. Below, the window with the longest draft that was accepted whole, and one that was "
        "rolled back. T′ is a candidate, T the verifier's own token at that place.</p>"
    )
    is_deterministic = trace.requests[request_id].is_deterministic

    def drawn(window: Window | None, kind: str) -> str:
        if window is None:
            return (
                f"<h3>{kind.capitalize()}: none</h3><p class='note'>No window of request {request_id} was {kind}. "
                f"{_elsewhere(trace, request_id)}</p>"
            )
        ledgers = [trace.ledger(request_id, step) for step in window.ledger_steps]
        last = window.start + len(window.target_token_ids) - 2
        heading = f"<h3>{kind.capitalize()}: positions {window.start - 1} to {last}</h3>"
        return heading + window_panels(window, events, ledgers, texts, is_deterministic=is_deterministic)

    return (
        head + note + legend()
        + drawn(accepted_whole(windows), "accepted whole")
        + drawn(rolled_back(windows), "rolled back")
    )  # fmt: skip


def _elsewhere(trace: "Trace", request_id: int) -> str:
    """Which other requests have windows of each kind, or that the run has none."""
    events = trace.events()
    windows = {r: find_windows(events, r) for r in trace.tokens if r != request_id}
    said = []
    for kind, pick in (("accepted whole", accepted_whole), ("rolled back", rolled_back)):
        having = [str(r) for r, found in windows.items() if pick(found)]
        said.append(f"Windows {kind} in other requests: {', '.join(having) if having else 'none'}.")
    return " ".join(said)


def _thoughts(trace: "Trace", request_id: int, texts: dict[int, str]) -> str:
    head = "<h2>What was thought of every chunk</h2>"
    thoughts = trace.thoughts()
    if request_id not in set(thoughts.request_id):
        having = ", ".join(str(r) for r in sorted({int(r) for r in thoughts.request_id}))
        return f"{head}<p class='note'>Request {request_id} wrote no thoughts; requests that did: {having}.</p>"
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
    hypotheses = trace.readings()
    first = len(trace.requests[request_id].prompt_token_ids) - 1
    end = first + len(trace.committed(request_id))
    shown = range(first, min(end, first + _MOST_POSITIONS))
    parts = ["<h2>Every layer beside what was committed</h2>"]
    cut = f" The first {len(shown)} of {end - first} positions are shown." if len(shown) < end - first else ""
    note = (
        "Every block's residual stream, read through the "
        f"{markup(trace.meta['lens'])} lens: the cell names its first choice, the colour is the log-probability "
        f"that it gave to the token committed next. A narrow screen scrolls the grid sideways.{cut}"
    )
    own = hypotheses[(hypotheses.request_id == request_id) & hypotheses.position.isin(shown)]
    if own.empty:
        parts.append(f"<p class='note'>No lens reading of request {request_id} was kept.</p>")
    else:
        grid = lens_grid(hypotheses, request_id, positions=shown, include="committed")
        parts.append(figure_block(grid, "lens-grid", note, min_width=grid_width(grid)))
        if (own.status == "rolled_back").any():
            every = lens_grid(hypotheses, request_id, positions=shown, include="all")
            about = "Candidates and rolled-back rows as columns of their own; what a rolled-back row was fed is wrong."
            inner = figure_block(every, "lens-grid-all", about, min_width=grid_width(every))
            parts.append(f"<details><summary>The same with the rows that lost</summary>{inner}</details>")
    agreement = figure_block(
        agreement_figure(trace.agreement()), "agreement",
        "Whole run. A line ends where a drafter stopped: its rows have no layers above.",
    )  # fmt: skip
    settling = figure_block(
        settling_figure(trace.settling()), "settling",
        "Whole run. Settled: the first choice no longer changes in the layers that ran.",
    )  # fmt: skip
    return "".join(parts) + f'<div class="two">{agreement}{settling}</div>'


def _controls(trace: "Trace") -> str:
    checks = [
        [check["name"], check["dtype"], check["tolerance"], check["num_rows"], float(check["worst"])]
        for check in trace.meta["checks"]
    ]
    columns = ["check", "dtype", "tolerance", "rows", "worst, as a share of the tolerance"]
    shown = table(columns, checks) if checks else "<p class='note'>This run made no checks.</p>"
    fingerprint = table(["setting", "value"], [[name, str(value)] for name, value in trace.fingerprint.items()])
    return (
        "<h2>Controls</h2><p class='note'>Identities that the captured states were held to while the run went on.</p>"
        f"{shown}<details><summary>Schedule fingerprint: what the bits of this run depend on</summary>"
        f"{fingerprint}</details>"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
