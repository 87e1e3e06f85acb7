"""Shows, below the card of a row, which edits would have made the verifier choose a rejected draft token."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from cacheprobe.trace.tables.token_history import TokenOutcome, outcomes_at
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.figures import graphs
from cacheprobe.views.dashboard.flip_jobs import FlipJob, FlipJobs
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, PageQuestion, number, one_of
from cacheprobe.views.dashboard.reader import is_on_this_machine
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.grids import flip_grid
from cacheprobe.views.text import markup

BUTTON = "What would have changed it?"
ACTS = ("start", "open", "look", "cancel")


def buttons(question: PageQuestion, history: pd.DataFrame, place: int, outcomes: Sequence[TokenOutcome]) -> str:
    """Returns HTML with a button for each rejected draft among the outcomes at one place of a request; "" for none.

    A token that followed a rejected one in its draft has no button: it was not judged.
    history: of the request.  place: 0 is the first generated token.
    """
    before = {one.decided_step for one in outcomes_at(history, place - 1) if one.outcome == "rolled_back"}
    here = {one.decided_step for one in outcomes if one.outcome == "rolled_back"}
    steps = sorted(step for step in here - before if step is not None)
    drawn = []
    for step in steps:
        place_of_draft = json.dumps({"run": question["run"], "request": question["request"], "step": step})
        which = f" (step {step})" if len(steps) > 1 else ""
        drawn.append(f'<button class="plain" data-flip="{markup(place_of_draft)}">{BUTTON}{which}</button>')
    return f'<p class="flips">{" ".join(drawn)}</p>' if drawn else ""


def view(shelf: Shelf, jobs: FlipJobs, question: PageQuestion) -> PageAnswer:
    """Returns how far the background process of one rejected draft is, or its result, as a dict for the page: html,
    graphs, more (the command), and goes_on (whether to ask again).

    question: run, request and step; do: "start", "look" or "cancel"; "open" looks too, and gives a button that starts
    the search if there is no process.
    Raises: CannotShow for a run whose model is not on this machine, or without a process, and with the reason if the
    process failed.
    """
    book, request = shelf.book_and_request(question)
    step, act = number(question["step"], "step"), one_of(question["do"], "do", ACTS)
    key = (book.run.directory, book.run.run_id, request, step)  # a verdict stays, while a run that is recorded grows
    if act == "start":
        name = shelf.model or book.run.fingerprint["model"]
        if not is_on_this_machine(name):
            raise CannotShow(f"the model {name} is not on this machine; give the directory of its weights with --model")
        directory = str(Path(book.run.directory).absolute())
        job = jobs.start(key, {"run": directory, "request": request, "step": step, "model": shelf.model})
    else:
        job = jobs.look(key)
    if job is None and act == "open":
        return {"html": _ready(request, step), "goes_on": False}
    if job is None:
        raise CannotShow(f"request {request} step {step}: nothing runs for it; press “{BUTTON}” again")
    if act == "cancel":
        job.cancel()
    if job.error:
        raise CannotShow(job.error)
    return _progress(job) if job.table is None else _result(book, shelf, job, dark=question.get("theme") == "dark")


def _ready(request: int, step: int) -> str:
    """Returns HTML with a button that starts the search."""
    return (
        f"<h3>What would have changed the verdict of request {request} in step {step}?</h3>"
        "<p class='note'>The search runs the model once for each edit of a state.</p>"
        "<button class='plain' data-flip-do='start'>Search the edits</button>"
    )


def _progress(job: FlipJob) -> PageAnswer:
    """Returns what the process does now, with a bar and a button that cancels it."""
    if job.is_cancelled:
        return {"html": "<p class='note'>Cancelled.</p>", "goes_on": False}
    count = f", {job.done} of {job.total} edits" if job.total else ""
    html = (
        f"<p class='note' role='status'>{markup(job.says)}{count} … "
        f"<progress max='{max(job.total, 1)}' value='{job.done}'></progress> "
        "<button class='plain' data-flip-do='cancel'>Cancel</button></p>"
    )
    return {"html": html, "goes_on": True}


def _result(book: Book, shelf: Shelf, job: FlipJob, *, dark: bool) -> PageAnswer:
    """Returns the figure of a finished job, what was left out, and the command that makes the figure."""
    assert job.table is not None
    figure = flip_grid(job.table)
    title = figure.layout.title.text
    left_out = "".join(f" Left out: {markup(reason)}." for reason in job.meta["left_out"])
    note = (
        "Each cell runs the committed text once more, with one state at the judged position replaced: by zeros, by the "
        "mean of the earlier positions, by the drafter’s own state, or by that of the drafted token. Colour: how much "
        f"closer the verifier comes to the drafted token, in nats.{left_out}"
    )
    html = f"<h3>{title}</h3><p class='note'>{note}</p>"
    more = f"<p class='note'>In a terminal: <code>{markup(_command(book, shelf, job))}</code></p>"
    return {"html": html, "graphs": graphs("flip", [figure], dark=dark), "more": more, "goes_on": False}


def _command(book: Book, shelf: Shelf, job: FlipJob) -> str:
    """Returns the command that computes the same."""
    request, step = job.meta["request_id"], job.meta["step"]
    words = ["cacheprobe", "flip", str(book.run.directory), "--request", str(request), "--step", str(step)]
    return shlex.join([*words, "--out", "flips.html", *(["--model", shelf.model] if shelf.model else [])])
