"""Wraps one stored run for the dashboard, and caches what the views compute from its tables."""

from collections.abc import Iterable
from functools import cached_property, lru_cache
from threading import Lock

import pandas as pd

from cacheprobe.analysis.windows import Window, find_windows, verified_requests
from cacheprobe.trace.manifest import UNFINISHED
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.build import ledger_at, rows_in_use
from cacheprobe.trace.tables.engine_differences import request_differences
from cacheprobe.trace.tables.token_history import token_history
from cacheprobe.trace.tables.token_table import RunTokens, SearchedText, request_texts, tokens_of_run
from cacheprobe.views.diagrams.lens_grid import finding
from cacheprobe.views.diagrams.timeline import step_words, timeline_finding
from cacheprobe.views.overview.selection import selected_tokens
from cacheprobe.views.rejected import rejected_of_run, selected
from cacheprobe.views.report.insight import first_to_show
from cacheprobe.views.report.request_text import TextParts, text_parts
from cacheprobe.views.text import text_of

WHOLE_REQUESTS = 8
"""Requests of which all readings are kept: at 30 layers, 1,000 tokens take about 30 MB."""


class RunTables:
    """Holds one stored run, and returns lines of the run's tables by request or step, and the range of positions on a
    page of the lens grid. Readings, windows, token histories and the tables split by request are cached."""

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self.name = run.directory.name
        self._readings = lru_cache(maxsize=WHOLE_REQUESTS)(run.readings)
        self.rejected_lines = lru_cache(maxsize=16)(lambda selection: selected(self.rejected, selection, run))
        self.token_lines = lru_cache(maxsize=16)(
            lambda selection: selected_tokens(self.tokens.lines, selection, self.request_texts)
        )
        self._tokens_lock = Lock()
        self.steps_in_words = lru_cache(maxsize=64)(self._steps_in_words)
        self.windows = lru_cache(maxsize=64)(self._windows)
        self.history_of = lru_cache(maxsize=256)(lambda request_id: token_history(self.events_of(request_id)))
        self.text_parts = lru_cache(maxsize=64)(self._text_parts)
        self.lens_finding = lru_cache(maxsize=256)(lambda request_id: finding(self.readings(request_id), request_id))

    def readings(self, request_id: int, positions: range | None = None) -> pd.DataFrame:
        """Returns the lens readings of one request, or those at some positions, as `StoredRun.readings`. Those of a few
        whole requests are kept."""
        whole = self._readings(request_id)
        return whole if positions is None else whole[whole.position.isin(positions)]

    def head_readings(self, request_id: int, position: int) -> pd.DataFrame:
        """Returns what the draft head read at one position of a request, numbered as by `Trace.hypotheses` with
        include_head; no line for a run without."""
        head = self.run.head
        if head is None or not head.has_readings:
            return self.run.rows.iloc[:0]
        own = head.readings(request_id, range(position, position + 1))
        return own.assign(row=own.row + len(self.run.rows), layer=own.layer + head.meta["head"]["first_layer"])

    def features_of(self, request_id: int) -> pd.DataFrame:
        """Returns the recorded features of a request, in the columns of `Trace.features`. Raises: ValueError for a run
        without recorded features."""
        if self.run.features is None:
            raise ValueError("this run recorded no features; run it with CaptureConfig(dictionary=...)")
        return self.run.features[self.run.features.request_id == request_id]

    def differences_of(self, request_id: int) -> pd.DataFrame:
        """Returns how far a request's log-probabilities are from the other program's, as `request_differences`. Raises:
        KeyError for a run that is no replay."""
        events = self.run.events[self.run.events.request_id == request_id]
        return request_differences(self.run.meta["replay"], events, request_id, self.prompt_length(request_id))

    @cached_property
    def rejected(self) -> pd.DataFrame:
        """The table of `Trace.rejected`."""
        return rejected_of_run(self.run)

    @property
    def tokens(self) -> RunTokens:
        """All tokens of the run. Computed once: a page that asks meanwhile waits for them."""
        with self._tokens_lock:
            return self._tokens

    @cached_property
    def _tokens(self) -> RunTokens:
        return tokens_of_run(self.run)

    @cached_property
    def request_texts(self) -> dict[int, SearchedText]:
        """Text of prompt and output of each request, for searches."""
        prompts, tokens = (
            {request["request_id"]: request[name] for request in self.run.requests}
            for name in ("prompt_token_ids", "committed_token_ids")
        )
        return request_texts(prompts, tokens, self.run.token_texts)

    @cached_property
    def steps(self) -> range:
        """Range of all steps of the run."""
        steps = self.run.events.step
        return range(int(steps.min()), int(steps.max()) + 1) if len(steps) else range(0)

    @cached_property
    def finding(self) -> str:
        """Sentence above the timeline, about the whole run, as plain text."""
        return timeline_finding(self.run.events)

    @cached_property
    def verified(self) -> dict[int, bool]:
        """Dict from request id to True if the request was ever verified, else False."""
        with_verdict = verified_requests(self.run.events)
        return {r["request_id"]: r["request_id"] in with_verdict for r in self.run.requests}

    @cached_property
    def _by_request(self) -> dict[str, dict[int, pd.DataFrame]]:
        """Lines of the events, the rows and the ledger table by request, by the name of the table."""
        tables = {"events": self.run.events, "rows": self.run.rows, "ledger": self.run.ledger}
        return {name: dict(iter(table.groupby("request_id"))) for name, table in tables.items()}

    @cached_property
    def _slots_by_step(self) -> pd.DataFrame:
        """Number of used cache slots of each request after each step that changed it."""
        return rows_in_use(self.run.ledger)

    def has_ended(self, request_id: int, step: int) -> bool:
        """Returns True if a request has ended by the end of a step, and so freed its cache slots."""
        finish = self.run.meta["finish"].get(str(request_id), UNFINISHED)
        return finish != UNFINISHED and step >= self._last_steps.get(request_id, step + 1)

    @cached_property
    def _last_steps(self) -> dict[int, int]:
        return self.run.events.groupby("request_id").step.max().to_dict()

    @cached_property
    def by_losses(self) -> list[int]:
        """Ids of all requests, those with the most rolled-back draft tokens first; equal ones in order of their ids."""
        lost = self.run.events.groupby("request_id").num_rolled_back.sum()
        ids = [request["request_id"] for request in self.run.requests]
        return sorted(ids, key=lambda request_id: (-int(lost.get(request_id, 0)), request_id))

    def events_of(self, request_id: int) -> pd.DataFrame:
        """Returns a DataFrame: the lines of the events table of one request; empty for an unknown request."""
        return self._by_request["events"].get(request_id, self.run.events.iloc[:0])

    def rows_of(self, request_id: int) -> pd.DataFrame:
        """Returns a DataFrame: the lines of the rows table of one request; empty for an unknown request."""
        return self._by_request["rows"].get(request_id, self.run.rows.iloc[:0])

    def ledger(self, request_id: int, step: int) -> pd.DataFrame:
        """Returns a DataFrame with one line for each cache slot of a request after a step, as `Trace.ledger` does."""
        return ledger_at(self._by_request["ledger"].get(request_id, self.run.ledger.iloc[:0]), step)

    def slots_in_use(self, step: int) -> tuple[int, int]:
        """Returns (number of cache slots in use, number of requests that use the slots) after a step. Requests that
        have ended do not count."""
        used = self._slots_by_step[self._slots_by_step.step <= step].groupby("request_id").rows.last()
        used = used[[rows > 0 and not self.has_ended(request_id, step) for request_id, rows in used.items()]]
        return int(used.sum()), len(used)

    def warm(self) -> None:
        """Computes and caches the tables and texts that the first page needs, so that the page loads faster."""
        _ = self.opening, self.verified, self.finding, self._slots_by_step, self.run.token_texts, self._by_request

    def prompt_length(self, request_id: int) -> int:
        """Returns the number of prompt tokens of a request."""
        return len(self.run.request(request_id)["prompt_token_ids"])

    def predicting_rows(self, request_id: int) -> pd.DataFrame:
        """Returns a DataFrame: the lines of the rows table of one request from the prompt's last token on. These rows
        predict generated tokens."""
        rows = self.rows_of(request_id)
        return rows[rows.position >= self.prompt_length(request_id) - 1]

    def histories(self, requests: Iterable[int]) -> pd.DataFrame:
        """Returns the token histories of several requests (at least one), as `token_history`."""
        return pd.concat([self.history_of(request) for request in requests], ignore_index=True)

    def _text_parts(self, request_id: int) -> TextParts:
        run, prompt = self.run, self.run.request(request_id)["prompt_token_ids"]
        texts = tuple(text_of(run.token_texts, int(token_id)) for token_id in prompt)
        readings = self.readings(request_id) if run.has_readings else None
        return text_parts(request_id, texts, len(prompt), self.events_of(request_id), readings, run.thoughts)

    def _windows(self, request_id: int) -> tuple[Window, ...]:
        events = self.events_of(request_id)
        return find_windows(events, request_id) if len(events) else ()

    def _steps_in_words(self, request_id: int) -> list[list[int | str]]:
        """Returns a list with [step, text, position to show, number of tokens committed so far] for each step of the
        request. The position is for a verdict that of the row that predicts the verifier's own token; else the largest
        of the step's rows."""
        last_position = self.rows_of(request_id).groupby("step").position.max()
        lines: list[list[int | str]] = []
        num_committed = 0
        for event in self.events_of(request_id).itertuples():
            position = int(last_position.get(event.step, -1))
            if pd.notna(event.num_accepted):
                position = int(event.draft_start) + int(event.num_accepted) - 1
            num_committed += len(event.committed_token_ids)
            lines.append([int(event.step), step_words(event), position, num_committed])
        return lines

    @cached_property
    def opening(self) -> dict[str, int]:
        """Dict {"request": id, "step": number} to show first: of the first partly accepted draft, else of the first
        rollback, else of the first verdict, else of the first step; both 0 without events."""
        request, step = 0, 0
        if (token := first_to_show(self.run.events)) is not None:
            request, step, _ = token
        elif len(self.run.events):
            request, step = self.run.events[["request_id", "step"]].iloc[0].astype(int).tolist()
        return {"request": request, "step": step}

    def page(self, request_id: int, position: int, include: str, columns: int) -> range:
        """Returns the page of the lens grid with `position`, as a range of positions. A page has at most `columns` rows
        of the trace, but at least one position; range(0) if no row of the request predicts a generated token.

        include: "committed" for committed rows, or "all"; a position then has a column for each of its rows. A
        `position` that no page has gives the last page.
        """
        rows = self.predicting_rows(request_id)
        if include == "committed":
            rows = rows[rows.status == "committed"]
        counts = rows.groupby("position").size()
        start, num_columns = None, 0
        for first_position, count in zip(counts.index, counts, strict=True):
            if start is None or num_columns + count > columns:
                if start is not None and start <= position < first_position:
                    return range(start, int(first_position))
                start, num_columns = int(first_position), 0
            num_columns += int(count)
        return range(0) if start is None else range(start, int(counts.index[-1]) + 1)
