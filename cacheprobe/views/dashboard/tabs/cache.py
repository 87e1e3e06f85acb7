"""Shows the cache of the chosen request after the chosen step, and the verify window of that step."""

from functools import cached_property

import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.views.dashboard.export import opened
from cacheprobe.views.dashboard.view import View
from cacheprobe.views.diagrams.cache import cache_piece
from cacheprobe.views.diagrams.cache_strip import memory_sentence
from cacheprobe.views.diagrams.diagram import (
    decoded_finding,
    decoded_phases,
    side_by_side,
    window_finding,
    window_phases,
)
from cacheprobe.views.diagrams.frame import TitledPicture
from cacheprobe.views.diagrams.windows import Window


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

    @property
    def _marks(self) -> JsonDict:
        """Arguments of the picture: the position of the newest committed token if its cache slot is the next to be
        written, else None; the number of slots that the step removed; whether the request has ended."""
        tables, request, step, window = self.tables, self.request, self.step, self.window
        has_ended, events = tables.has_ended(request, step), tables.events_of(request)
        num_committed = int(events[events.step <= step].committed_token_ids.map(len).sum())
        last = int(self.table().position.max())
        is_pending = num_committed and tables.prompt_length(request) + num_committed - 1 == last + 1
        return {
            "pending": last + 1 if is_pending and not has_ended else None,
            "truncated": window.num_truncated if window is not None and window.step == step else 0,
            "has_ended": has_ended,
        }

    def draw(self) -> str:
        """Returns HTML: the picture of the cache slots, and a sentence on the cache memory of all requests; a note if
        the request has no cache slots after this step."""
        tables, request, step, ledger = self.tables, self.request, self.step, self.table()
        if ledger.empty:
            if (tables.events_of(request).step <= step).any():
                return (
                    f"<h2>Request {request} holds no cache slots after step {step}</h2><p class='note'>It was "
                    "preempted, and freed its slots.</p>"
                )
            return (
                f"<h2>Request {request} holds no cache slots yet</h2><p class='note'>After step {step} it has not been "
                "read; move on to a step of its own.</p>"
            )
        meta, marks = tables.run.meta, self._marks
        memory = memory_sentence(
            len(ledger), *tables.slots_in_use(step), meta["config"]["capacity"], meta.get("cache_row_bytes"),
            has_ended=marks["has_ended"],
        )  # fmt: skip
        windows = tables.windows(request)
        return cache_piece(ledger, memory, request_id=request, step=step, windows=windows, **marks).html

    def code(self) -> list[str]:
        """Returns the code of the picture."""
        code = [*opened(self.tables), f"table = trace.ledger({self.request}, {self.step})"]
        if not self.table().empty:
            marks = ", ".join(f"{name}={value!r}" for name, value in self._marks.items())
            code += [f"cp.plots.cache_picture(table, request_id={self.request}, step={self.step}, {marks})"]
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
            finding = decoded_finding(tables.events_of(request))
            panels = decoded_phases(request, events, ledgers, texts)
        else:
            finding = window_finding(window)
            panels = window_phases(window, events, ledgers, texts, is_deterministic=self._is_deterministic)
        return TitledPicture(finding, "", side_by_side(panels)).html

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
                f"windows = cp.plots.find_windows(events, {request})",
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
