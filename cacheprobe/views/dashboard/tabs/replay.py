"""Shows the run step by step: requests by steps, the whole run as a strip, requests by generated tokens, the cache of
the chosen request, and its verify window."""

from functools import cached_property

import pandas as pd

from cacheprobe.analysis.windows import Window
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.token_history import standing_at, tokens_with_texts
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, number, span
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.dashboard.view import View, opened
from cacheprobe.views.diagrams.cache import cache_picture, memory_sentence
from cacheprobe.views.diagrams.decode_grid import decode_picture
from cacheprobe.views.diagrams.diagram import decoded_diagram, window_diagram
from cacheprobe.views.diagrams.timeline import (
    MOST_STEPS,
    PITCH,
    WIDEST,
    ZOOMED_PITCH,
    run_map,
    timeline_picture,
)

MOST_TOKENS = 40
MOST_LINES = 25
"""Largest number of requests in the timeline and in the grid of tokens; lines.js has it too."""
MOST_ZOOMED = 240
"""Largest number of steps in a zoomed timeline; lines.js has it too."""
MOST_PARTS = 400
"""Largest number of parts of the steps in a picture of the whole run."""


class _OfRequests(View):
    """A view that shows some requests, one below the other."""

    @cached_property
    def requests(self) -> list[int]:
        """Ids of the requests of the page: places [first, end] of all requests, in order of their ids, or of their
        losses. Raises: CannotShow if there are none."""
        places, order = span(self.question["requests"], "requests", MOST_LINES), _order(self.tables, self.question)
        requests = order[max(places.start, 0) : max(places.stop, 0)]
        if not requests:
            raise CannotShow(f"there is no request at {self.question['requests']} in this run")
        return requests


class Timeline(_OfRequests):
    """One page of the timeline: the passes of some requests in some steps. zoomed: the steps were chosen, and fill the
    width."""

    notebook = (
        "events = trace.events()",
        "table = events[events.request_id.isin({self.requests}) & events.step.isin({self.steps})]",
        "cp.plots.timeline(events, requests={self.requests}, steps={self.steps})",
    )

    @cached_property
    def steps(self) -> range:
        """Steps of the page."""
        steps = span(self.question["steps"], "steps", MOST_ZOOMED if self.is_zoomed else MOST_STEPS)
        return range(steps.start, min(steps.stop, self.tables.steps.stop))

    @property
    def is_zoomed(self) -> bool:
        """Whether the steps were chosen."""
        return self.question.get("zoomed") is True

    def draw(self) -> str:
        """Returns HTML of the timeline: requests by steps."""
        run, requests = self.tables.run, self.requests
        # in a run that grows, steps have one width, however many there are, unless they were chosen
        width = 0 if "growing" in run.meta and not self.is_zoomed else number(self.question["width"], "width")
        least, most = ZOOMED_PITCH if self.is_zoomed else (PITCH, WIDEST)
        is_sorted = self.question.get("order") == "losses"
        note = " Sorted by the number of tokens rolled back, most first." if is_sorted else ""
        note += " A cell is one pass of one request; click one. Drag over steps to zoom."
        fit = (width, least, most)
        found = self.tables.finding
        return timeline_picture(run.events, requests, self.steps, len(run.requests), found, fit=fit, note=note).html

    def table(self) -> pd.DataFrame:
        """Returns the lines of the events table of these requests and steps."""
        events = self.tables.run.events
        return events[events.request_id.isin(self.requests) & events.step.isin(self.steps)]


def _order(tables: RunTables, question: PageQuestion) -> list[int]:
    """Returns the ids of all requests from the top of the timeline down: by number, or by tokens rolled back."""
    return tables.by_losses if question.get("order") == "losses" else sorted(tables.by_losses)


def map_of_run(run_list: RunList, question: PageQuestion) -> str:
    """Returns HTML of the map of all requests and steps, below the timeline; its order is the timeline's."""
    tables = run_list.tables(question["run"])
    return run_map(tables.run.events, _order(tables, question), tables.steps, MOST_PARTS)


def overview(run_list: RunList, question: PageQuestion) -> str:
    """Returns HTML of the whole run as a strip, below the slider of steps: the shares of draft tokens that were
    accepted, green and upwards, and rolled back, red and downwards; a thin line where no draft was judged. The page
    moves the frame of class "shown" over the steps of the timeline."""
    tables = run_list.tables(question["run"])
    events, steps = tables.run.events, tables.steps
    per_part = max(-(-len(steps) // MOST_PARTS), 1)
    judged = events[events.num_accepted.notna()]
    counts = pd.DataFrame({
        "part": (judged.step - steps.start) // per_part,
        "drafted": judged.draft_token_ids.map(len),
        "accepted": judged.num_accepted.astype(int),
    }).groupby("part").sum()  # fmt: skip
    parts = [f'<rect class="fill-blue" x="{steps.start}" y="7" width="{len(steps)}" height="2"/>']
    for part, (drafted, accepted) in zip(counts.index, counts.to_numpy().tolist(), strict=True):
        if not drafted:
            continue
        first, high = int(part) * per_part, 8 * accepted / drafted
        where = f'x="{steps.start + first}" width="{min(per_part, len(steps) - first)}"'
        parts.append(f'<rect class="fill-green" {where} y="{8 - high:.2f}" height="{high:.2f}"/>')
        parts.append(f'<rect class="fill-red" {where} y="8" height="{8 - high:.2f}"/>')
    parts.append('<rect class="shown" y="0" width="0" height="16"/>')
    label = "draft tokens by step: up and green accepted, down and red rolled back"
    box = f'viewBox="{steps.start} 0 {max(len(steps), 1)} 16" preserveAspectRatio="none"'
    return f'<svg {box} role="img" aria-label="{label}"><title>{label}</title>{"".join(parts)}</svg>'


class TokenGrid(_OfRequests):
    """The grid of requests by generated tokens after the chosen step."""

    notebook = (
        "table = cp.analysis.tokens_at(trace, {self.step})",
        "table = table[table.request_id.isin({self.requests}) & table.place.isin({self.places})]",
        "cp.plots.decode_grid(trace.events(), {self.step}, trace.token_texts, requests={self.requests}, "
        "places={self.places}, chosen={self.chosen})",
    )

    @cached_property
    def places(self) -> range:
        """Indices of the generated tokens of the page."""
        return span(self.question["places"], "places", MOST_TOKENS)

    @property
    def chosen(self) -> tuple[int, int]:
        """The chosen request, and the index of its chosen token."""
        return self.request, number(self.question["place"], "place")

    def draw(self) -> str:
        """Returns HTML of the grid: a line for each request, a cell for each committed or drafted token."""
        tables, requests = self.tables, self.requests
        return decode_picture(
            tables.histories({*requests, self.request}), requests, self.places, self.step, tables.run.token_texts,
            verified=tables.verified, chosen=self.chosen,
        ).html  # fmt: skip

    def table(self) -> pd.DataFrame:
        """Returns the lines of `cp.analysis.tokens_at` in the cells."""
        standing = standing_at(self.tables.histories(self.requests), self.step)
        tokens = tokens_with_texts(standing, self.tables.run.token_texts)
        return tokens[tokens.place.isin(self.places)]


class _AtWindow(View):
    """A view that shows a verify window."""

    @cached_property
    def window(self) -> Window | None:
        """First verify window of the request that ends at the step or later, else the last window; None without any."""
        windows = self.tables.windows(self.request)
        return next((w for w in windows if w.step >= self.step), windows[-1] if windows else None)


class CacheSlots(_AtWindow):
    """The cache slots of one request after a step."""

    def table(self) -> pd.DataFrame:
        """Returns a line for each cache slot, as `Trace.ledger`."""
        return self.tables.ledger(self.request, self.step)

    @cached_property
    def marks(self) -> JsonDict:
        """Arguments of `cache_picture`. pending is the newest committed token if its cache slot is the next to be
        written."""
        tables, request, step, window = self.tables, self.request, self.step, self.window
        has_ended, events = tables.has_ended(request, step), tables.events_of(request)
        num_committed = int(events[events.step <= step].committed_token_ids.map(len).sum())
        last = int(self.table().position.max())
        is_pending = num_committed and tables.prompt_length(request) + num_committed - 1 == last + 1
        pending = last + 1 if is_pending and not has_ended else None
        truncated = window.num_truncated if window and window.step == step else 0
        return {"request_id": request, "step": step, "pending": pending, "truncated": truncated, "has_ended": has_ended}

    def draw(self) -> str:
        """Returns HTML: the picture of the cache slots, and a sentence on the cache memory of all requests; a note if
        the request has no cache slots after this step."""
        tables, request, step, ledger = self.tables, self.request, self.step, self.table()
        if ledger.empty:
            when, why = "yet", f"After step {step} it has not been read; move on to a step of its own."
            if (tables.events_of(request).step <= step).any():
                when, why = f"after step {step}", "It was preempted, and freed its slots."
            return f"<h2>Request {request} holds no cache slots {when}</h2><p class='note'>{why}</p>"
        meta, in_use = tables.run.meta, tables.slots_in_use(step)
        sizes = meta["config"]["capacity"], meta.get("cache_row_bytes")
        memory = memory_sentence(len(ledger), *in_use, *sizes, has_ended=tables.has_ended(request, step))
        return cache_picture(ledger, **self.marks, windows=tables.windows(request), memory=memory).html

    def code(self) -> list[str]:
        """Returns the code of the picture."""
        code = [*opened(self.tables), f"table = trace.ledger({self.request}, {self.step})"]
        if not self.table().empty:
            marks = ", ".join(f"{name}={value!r}" for name, value in self.marks.items())
            code += [f"cp.plots.cache_picture(table, {marks})"]
        return code


class VerifyWindow(_AtWindow):
    """The verify window of a request, the first that ends at the step or later, else the last; of a never verified
    request, its prefill and its last step."""

    @cached_property
    def decoded_steps(self) -> tuple[int, int] | None:
        """Last step of the prefill, and last step, of a request that was never verified; None for another, and if it
        generated nothing."""
        events = self.tables.events_of(self.request)
        prefills = events[events.phase == "prefill"]
        if self.tables.verified[self.request] or not prefills.committed_token_ids.map(len).any():
            return None
        return int(prefills.step.max()), int(events.step.max())

    @property
    def _is_deterministic(self) -> bool:
        return bool(self.tables.run.request(self.request)["is_deterministic"])

    def draw(self) -> str:
        """Returns HTML: the four panels of the window; of a never verified request two panels; without either, a title
        that says so."""
        tables, request, window = self.tables, self.request, self.window
        events, texts = tables.run.events, tables.run.token_texts
        steps = self.decoded_steps if window is None else window.ledger_steps
        if steps is None:
            return f"<h2>No verify window of request {request} at or after this step</h2>"
        ledgers = [tables.ledger(request, step) for step in steps]
        if ledgers[-1].empty:
            last = steps[-1] if window is None else window.step
            return f"<h2>Request {request} was preempted in step {last}, and freed its cache slots</h2>"
        if window is None:
            return decoded_diagram(request, events, ledgers, texts).html
        return window_diagram(window, events, ledgers, texts, is_deterministic=self._is_deterministic).html

    @cached_property
    def _steps(self) -> list[int] | None:
        """Steps of the window's drafts and of its verify pass; None without a window."""
        return None if self.window is None else sorted({*self.window.decode_steps, self.window.step})

    def table(self) -> pd.DataFrame:
        """Returns the rows that the drafts and the verify pass computed; all rows of a request without a window."""
        rows = self.tables.rows_of(self.request)
        return rows if self._steps is None else rows[rows.step.isin(self._steps)]

    def code(self) -> list[str]:
        """Returns the code of the panels."""
        request, window = self.request, self.window
        code = [*opened(self.tables), "events = trace.events()", f"table = trace.rows({request})"]
        if window is not None:
            return [
                *code,
                f"table = table[table.step.isin({self._steps})]",
                f"windows = cp.analysis.find_windows(events, {request})",
                f"window = next(window for window in windows if window.step == {window.step})",
                f"ledgers = [trace.ledger({request}, step) for step in window.ledger_steps]",
                "cp.plots.window_diagram(window, events, ledgers, trace.token_texts, "
                f"is_deterministic={self._is_deterministic})",
            ]  # fmt: skip
        if self.decoded_steps is not None:
            code += [
                f"ledgers = [trace.ledger({request}, step) for step in {self.decoded_steps}]",
                f"cp.plots.decoded_diagram({request}, events, ledgers, trace.token_texts)",
            ]
        return code
