"""Wraps one stored run, and keeps what the views compute from its tables."""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import pandas as pd

from cacheprobe.plots.diagrams.timeline import step_words, timeline_finding
from cacheprobe.plots.diagrams.windows import Window, find_windows
from cacheprobe.plots.report.insight import opening
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.ledgers import ledger_at, rows_in_use
from cacheprobe.trace.tables.token_history import standing_at, token_history


class Book:
    """A stored run with look-ups by request, by step and by page of positions; results are cached."""

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self.name = run.directory.name
        self.readings = lru_cache(maxsize=32)(run.readings)
        self.story = lru_cache(maxsize=64)(self._story)
        self.windows = lru_cache(maxsize=64)(self._windows)
        self.history_of = lru_cache(maxsize=256)(self._history_of)

    @cached_property
    def steps(self) -> range:
        """All steps of the run."""
        steps = self.run.events.step
        return range(int(steps.min()), int(steps.max()) + 1) if len(steps) else range(0)

    @cached_property
    def finding(self) -> str:
        """The sentence above the timeline, about the whole run."""
        return timeline_finding(self.run.events)

    @cached_property
    def verified(self) -> dict[int, bool]:
        """By request: whether it was ever verified."""
        events = self.run.events
        spoken = set(events.request_id[events.phase == "verify"].tolist())
        return {r["request_id"]: r["request_id"] in spoken for r in self.run.requests}

    @cached_property
    def _by_request(self) -> dict[int, pd.DataFrame]:
        return dict(iter(self.run.events.groupby("request_id")))

    @cached_property
    def _rows_by_request(self) -> dict[int, pd.DataFrame]:
        return dict(iter(self.run.rows.groupby("request_id")))

    @cached_property
    def _ledger_by_request(self) -> dict[int, pd.DataFrame]:
        return dict(iter(self.run.ledger.groupby("request_id")))

    @cached_property
    def _in_use(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """By request: its last step, the steps at which its number of cache rows changed, and the numbers from
        then on.
        """
        tables = rows_in_use(self.run.ledger).groupby("request_id")
        last = self.run.events.groupby("request_id").step.max()
        return [(int(last[r]), table.step.to_numpy(), table.rows.to_numpy()) for r, table in tables]

    def events_of(self, request_id: int) -> pd.DataFrame:
        """Returns the events of one request."""
        return self._by_request.get(request_id, self.run.events.iloc[:0])

    def events_of_all(self, requests: Sequence[int]) -> pd.DataFrame:
        """Returns the events of several requests."""
        return pd.concat([self.run.events.iloc[:0], *(self.events_of(r) for r in requests)])

    def rows_of(self, request_id: int) -> pd.DataFrame:
        """Returns the rows of one request."""
        return self._rows_by_request.get(request_id, self.run.rows.iloc[:0])

    def ledger(self, request_id: int, step: int) -> pd.DataFrame:
        """Returns the ledger of a request's cache slots after a step, a table as `Trace.ledger` returns it."""
        changes = self._ledger_by_request.get(request_id)
        return ledger_at(self.run.ledger.iloc[:0] if changes is None else changes, step)

    def held(self, step: int) -> tuple[int, int]:
        """Returns two counts at a step: the cache slots in use, and the requests that use them."""
        rows = requests = 0
        for last, steps, counts in self._in_use:
            place = int(np.searchsorted(steps, step, side="right")) - 1
            if place >= 0 and last >= step and counts[place]:
                rows, requests = rows + int(counts[place]), requests + 1
        return rows, requests

    def warm(self) -> None:
        """Computes what the first page needs, so that the page loads faster."""
        _ = self.opening, self.verified, self.finding, self._in_use, self.run.token_texts

    def prompt_length(self, request_id: int) -> int:
        """Returns the number of prompt tokens of a request."""
        return len(self.run.request(request_id)["prompt_token_ids"])

    def predicting_rows(self, request_id: int) -> pd.DataFrame:
        """Returns the rows from the prompt's last token on; lens readings are of these rows."""
        rows = self.rows_of(request_id)
        return rows[rows.position >= self.prompt_length(request_id) - 1]

    def standing(self, requests: range, step: int) -> pd.DataFrame:
        """Returns the tokens at each place after a step, as `token_history.standing_at`."""
        return standing_at(pd.concat([self.history_of(r) for r in requests], ignore_index=True), step)

    def _history_of(self, request_id: int) -> pd.DataFrame:
        return token_history(self.events_of(request_id))

    def _windows(self, request_id: int) -> tuple[Window, ...]:
        events = self.events_of(request_id)
        return find_windows(events, request_id) if len(events) else ()

    def _story(self, request_id: int) -> list[list[int | str]]:
        """Returns, for each step of the request: [step, words, position that the step concerns]."""
        last = self.rows_of(request_id).groupby("step").position.max()
        story: list[list[int | str]] = []
        for event in self.events_of(request_id).itertuples():
            at = int(last.get(event.step, -1))
            if event.phase == "verify" and pd.notna(event.num_accepted):
                at = int(event.draft_start) + int(event.num_accepted) - 1
            story.append([int(event.step), step_words(event), at])
        return story

    @cached_property
    def opening(self) -> dict[str, int]:
        """The request and step to show first: the first partly accepted rollback, else any verify pass, else the first
        step.
        """
        events = self.run.events
        if (at := opening(events)) is not None:
            return {"request": at.request_id, "step": at.step}
        if events.empty:
            return {"request": 0, "step": 0}
        return {"request": int(events.request_id.iloc[0]), "step": int(events.step.iloc[0])}

    def page(self, request_id: int, position: int, include: str, columns: int) -> range:
        """Returns the positions of the page of the lens grid that holds `position`: at most `columns` rows, at least
        one position.

        include: "committed" or "all"; with candidates and rolled-back rows a position has several columns.
        """
        rows = self.predicting_rows(request_id)
        if include == "committed":
            rows = rows[rows.status == "committed"]
        counts = rows.groupby("position").size()
        start, used = None, 0
        for at, count in zip(counts.index, counts, strict=True):
            if start is None or used + count > columns:
                if start is not None and start <= position < at:
                    return range(start, int(at))
                start, used = int(at), 0
            used += int(count)
        return range(0) if start is None else range(start, int(counts.index[-1]) + 1)
