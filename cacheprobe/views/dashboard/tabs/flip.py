"""Shows, below the card of a row, which edits would have made the verifier choose a rejected draft token."""

import shlex
from collections.abc import Hashable, Sequence
from functools import partial

import pandas as pd

from cacheprobe.views.dashboard.flip_jobs import FlipJob
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, one_of
from cacheprobe.views.dashboard.view import View, button, opened_with_model
from cacheprobe.views.grids import flip_grid
from cacheprobe.views.text import markup

BUTTON = "What would have changed it?"
ACTS = ("start", "open", "look", "cancel")


class FlipSearch(View):
    """The search for edits that would have changed the verdict on one rejected draft, in the background.

    question: run, request and step; do: "start", "look" or "cancel"; "open" looks too, and gives a button that starts
    the search if there is none.
    """

    @property
    def _key(self) -> Hashable:
        """Names the verdict, which stays while a run that is recorded grows."""
        return self.tables.run.directory, self.tables.run.run_id, self.request, self.step

    def _job(self) -> FlipJob | None:
        """Returns the search, which is started if the question says so; None without one. Raises: CannotShow for a run
        whose model is not on this machine."""
        jobs, reader = self.run_list.jobs, self.run_list.reader
        if one_of(self.question["do"], "do", ACTS) != "start":
            return jobs.look(self._key)
        if reason := reader.no_model(self.tables):
            raise CannotShow(reason)
        return jobs.start(self._key, partial(reader.flip, self.tables, self.request, self.step))

    def draw(self) -> PageAnswer:
        """Returns how far the search is, or its result: html, graphs, more (the command), and goes_on (whether to ask
        again). Raises: CannotShow without a search, and with the reason if it failed."""
        job, act = self._job(), self.question["do"]
        if job is None and act == "open":
            html = (
                f"<h3>What would have changed the verdict of request {self.request} in step {self.step}?</h3>"
                "<p class='note'>The search runs the model once for each edit of a state.</p>"
                f"{button('Search the edits', **{'flip-do': 'start'})}"
            )
            return {"html": html, "goes_on": False}
        if job is None:
            raise CannotShow(f"request {self.request} step {self.step}: nothing runs for it; press “{BUTTON}” again")
        if act == "cancel":
            job.is_cancelled = job.is_running
        if job.error:
            raise CannotShow(job.error)
        if job.found is not None:
            return self._result(job.found.table, job.found.meta["left_out"])
        if job.is_cancelled:
            return {"html": "<p class='note'>Cancelled.</p>", "goes_on": False}
        says = f"editing states, {job.done} of {job.total} edits" if job.total else "loading the model"
        html = (
            f"<p class='note' role='status'>{says} … "
            f"<progress max='{max(job.total, 1)}' value='{job.done}'></progress> "
            "<button class='plain' data-flip-do='cancel'>Cancel</button></p>"
        )
        return {"html": html, "goes_on": True}

    def _result(self, table: pd.DataFrame, reasons: Sequence[str]) -> PageAnswer:
        """Returns the figure of a result, what was left out and why, and the command that makes the figure."""
        figure = flip_grid(table)
        left_out = "".join(f" Left out: {markup(reason)}." for reason in reasons)
        note = (
            "Each cell runs the committed text once more, with one state at the judged position replaced: by zeros, by "
            "the mean of the earlier positions, by the drafter’s own state, or by that of the drafted token. Colour: "
            f"how much closer the verifier comes to the drafted token, in nats.{left_out}"
        )
        html = f"<h3>{figure.layout.title.text}</h3><p class='note'>{note}</p>"
        words = ["cacheprobe", "flip", str(self.tables.run.directory), "--request", str(self.request)]
        words += ["--step", str(self.step), "--out", "flips.html"]
        words += ["--model", self.run_list.model] if self.run_list.model else []
        more = f"<p class='note'>In a terminal: <code>{markup(shlex.join(words))}</code></p>"
        return {"html": html, "graphs": self.graphs("flip", [figure]), "more": more, "goes_on": False}

    def table(self) -> pd.DataFrame:
        """Returns the result of the search. Raises: CannotShow if there is none yet."""
        job = self.run_list.jobs.look(self._key)
        if job is None or job.found is None:
            raise CannotShow(f"request {self.request} step {self.step}: no result of this search yet")
        return job.found.table

    def code(self) -> list[str]:
        """Returns the code of the search."""
        self.table()
        return [
            *opened_with_model(self.run_list, self.tables),
            f"found = cp.analysis.flip(trace, {self.request}, {self.step})  # cacheprobe/analysis/flips.py",
            "table = found.table",
            "found.plot()",
        ]
