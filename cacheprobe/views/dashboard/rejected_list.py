"""Sorts, searches and pages the list of a run's rejected drafts, and finds the next or previous one from a place."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import accumulate
from threading import Lock, Thread
from typing import NamedTuple

import numpy as np
import pandas as pd

from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.rejected import (
    DECIDED_COLUMNS,
    DECIDING_COLUMNS,
    judging_rows,
    layers_that_decided,
    rejected_drafts,
    with_layers,
)
from cacheprobe.views.text import plain, text_of

LINES_A_PAGE = 50
SORTS = {
    "drafted": "drafted_token",
    "committed": "committed_token",
    "request": "request_id",
    "step": "step",
    "position": "position",
    "drafter": "drafter_layer",
    "flip": "flip_layer",
    "margin": "margin_at_least_nats",
}
"""Column that the list is sorted by, by its name in the page's address."""
_LINES_AT_ONCE = 128
"""Lines whose readings are read together; between them other threads may read."""

Range = tuple[float | None, float | None]
"""Least and most, both included; None for no limit."""
Decision = tuple[object, object, object]
"""The values of DECIDED_COLUMNS of one line, None for null."""


class Selection(NamedTuple):
    """Says which rejected drafts the list holds, and in which order."""

    find: str = ""
    """Text that the list's lines contain, case ignored; "" for all lines."""
    sort: str = ""
    """Key of SORTS, with "-" in front for the largest first; "" for the order of requests and steps."""
    request: int | None = None
    """Only the rejected drafts of this request; None for all."""
    drafter: int | None = None
    """Only drafts of a pass that ended at this layer, or -1 for those of all layers or of no pass; None for all."""
    flips: Range | str | None = None
    """Only lines whose committed token is first from one of these layers on; "none" for those without such a layer;
    None for all."""
    margin: Range | None = None
    """Only lines whose margin is in this range, in nats; None for all. A margin of which only a least value is known
    is in no range that has a most."""


class RejectedList:
    """Holds the rejected drafts of one run. Lens readings are read for those lines that are shown, and kept."""

    def __init__(self, run: StoredRun, before: "RejectedList | None" = None) -> None:
        """before: the list of the same run up to an earlier part, whose readings are taken over."""
        self.run = run
        same_run = before is not None and before.run.run_id == run.run_id
        self._decisions: dict[int, Decision] = dict(before._decisions) if before is not None and same_run else {}
        """By row number."""
        self._lock = Lock()
        self._is_read_ahead = False
        self.lines = lru_cache(maxsize=16)(self._lines)

    @cached_property
    def drafts(self) -> pd.DataFrame:
        """The table of `Trace.rejected` without the columns that need lens readings; and row, the number of the row
        that judged the draft."""
        run = self.run
        prompts = {request["request_id"]: request["prompt_token_ids"] for request in run.requests}
        tokens = {request["request_id"]: request["committed_token_ids"] for request in run.requests}
        table = rejected_drafts(run.events, run.rows, prompts, tokens, run.token_texts)
        return table.assign(row=judging_rows(table, run.rows))

    def table(self, lines: Iterable[int]) -> pd.DataFrame:
        """Returns these lines of the table of `Trace.rejected`, in this order, with flip_layer and margins."""
        chosen = self.drafts.iloc[list(lines)]
        if not self.run.has_readings or chosen.empty:
            return with_layers(chosen, None)
        self._read(chosen)
        decisions = [self._decisions.get(row, (None, None, None)) for row in chosen.row]
        decided = pd.DataFrame(decisions, columns=pd.Index(DECIDED_COLUMNS), index=chosen.index)
        return with_layers(chosen, decided)

    def read_ahead(self) -> None:
        """Starts a thread that reads the lens readings of all lines, so that sorting by them need not wait. Errors are
        left to whoever asks for the lines."""

        def read_all() -> None:
            """Reads all lines, some at a time."""
            with suppress(Exception):
                for start in range(0, len(self.drafts), _LINES_AT_ONCE):
                    self._read(self.drafts.iloc[start : start + _LINES_AT_ONCE])

        if self.run.has_readings and not self._is_read_ahead:
            self._is_read_ahead = True
            Thread(target=read_all, daemon=True).start()

    def _read(self, chosen: pd.DataFrame) -> None:
        """Reads what the lens readings say of these lines of `drafts`, if they are not known yet."""
        with self._lock:
            is_missing = [pd.notna(row) and row not in self._decisions for row in chosen.row]
            missing = chosen[is_missing]
            if missing.empty:
                return
            readings = self.run.readings_of_rows(missing.row.astype("int64").tolist(), DECIDING_COLUMNS)
            decided = layers_that_decided(missing, readings).astype(object)
            values = decided.where(decided.notna(), None)[DECIDED_COLUMNS].itertuples(index=False, name=None)
            self._decisions |= dict(zip(missing.row.tolist(), values, strict=True))

    @cached_property
    def _texts(self) -> dict[int, tuple[str, list[int]]]:
        """What a search looks through, by request: the prompt and the generated text, and where each token begins."""
        texts = {}
        for request_id in self.drafts.request_id.unique().tolist():
            request = self.run.request(request_id)
            ids = (*request["prompt_token_ids"], *request["committed_token_ids"])
            tokens = [searchable(text_of(self.run.token_texts, token)) for token in ids]
            texts[request_id] = "".join(tokens), [0, *accumulate(map(len, tokens))]
        return texts

    def _has(self, wanted: str) -> np.ndarray:
        """Returns a bool for each line of `drafts`: whether `wanted`, from `searchable`, is in the text up to the
        drafted token or up to the committed one, these included."""
        first = {request_id: text.find(wanted) for request_id, (text, _) in self._texts.items()}
        found = []
        for line in self.drafts.fillna({"committed_token": ""}).itertuples():
            text, starts = self._texts[line.request_id]
            start = starts[line.position]
            end = text[max(start - len(wanted), 0) : start]
            tokens = (searchable(token) for token in (line.drafted_token, line.committed_token))
            is_before = 0 <= first[line.request_id] <= start - len(wanted)
            found.append(is_before or any(wanted in end + token for token in tokens))
        return np.array(found, dtype=bool)

    def left_out(self, selection: Selection) -> tuple[int, int]:
        """Returns how many lines a range leaves out, and nothing else does, because they lack its number: (lines
        without a layer, lines of whose margin only a least value is known). 0 for a range that is not set."""
        has_flips, has_most = isinstance(selection.flips, tuple), (selection.margin or (None, None))[1] is not None
        without_layer = self.lines(selection._replace(flips="none")) if has_flips else ()
        others = self.table(self.lines(selection._replace(margin=None)) if has_most else ())
        return len(without_layer), int(others.margin_nats.isna().sum())

    def _lines(self, selection: Selection) -> tuple[int, ...]:
        """Returns the numbers of the lines of `drafts` that the list holds, in its order. Raises: ValueError for an
        unknown column to sort by."""
        kept = np.arange(len(self.drafts))
        if selection.request is not None:
            kept = kept[self.drafts.request_id.to_numpy() == selection.request]
        if selection.drafter is not None:
            layers = self.drafts.drafter_layer.fillna(-1).to_numpy(dtype=int)
            kept = kept[layers[kept] == selection.drafter]
        if selection.find:
            kept = kept[self._has(searchable(selection.find))[kept]]
        if selection.flips is not None or selection.margin is not None:
            table = self.table(kept.tolist())
            if isinstance(selection.flips, str):
                fits = table.flip_layer.isna().to_numpy()
            else:
                fits = _within(table.flip_layer, table.flip_layer, selection.flips)
            kept = kept[fits & _within(table.margin_at_least_nats, table.margin_nats, selection.margin)]
        if selection.sort:
            kept = kept[self._order(kept, selection.sort)]
        return tuple(kept.tolist())

    def _order(self, lines: np.ndarray, sort: str) -> np.ndarray:
        """Returns the order of lines, as places among them; unknown values come last."""
        column = SORTS[sort.removeprefix("-")]
        table = self.table(lines.tolist()) if column in DECIDED_COLUMNS else self.drafts.iloc[lines]
        values = table[column].reset_index(drop=True)
        if column.endswith("token"):
            values = values.map(searchable, na_action="ignore")
        is_rising = not sort.startswith("-")
        return values.sort_values(kind="stable", na_position="last", ascending=is_rising).index.to_numpy()

    def walk(self, selection: Selection, place: tuple[int, int, int], by: int) -> int | None:
        """Returns the place in the list, counted from 0, that is `by` lines on from the line at `place`; of the nearest
        line if the list ends before it. None for an empty list, and if `place` is already the last on that side.

        place: (request, step, position) of a drafted token. If no line is there, the walk begins between its neighbours
        in a list that is sorted by request and step, else before the first line, or behind the last one.
        """
        lines, sign = self.lines(selection), 1 if by > 0 else -1
        table = self.drafts.iloc[list(lines)]
        found = np.flatnonzero((table.request_id == place[0]).to_numpy() & (table.position == place[2]).to_numpy())
        if len(found):
            start = int(found[0])
        elif not selection.sort:
            steps = list(zip(table.request_id.tolist(), table.step.tolist(), strict=True))
            start = bisect_right(steps, place[:2]) - 1 if by > 0 else bisect_left(steps, place[:2])
        else:
            start = -1 if by > 0 else len(lines)
        return min(max(start + by, 0), len(lines) - 1) if 0 <= start + sign < len(lines) else None


def _within(at_least: pd.Series, exactly: pd.Series, limits: Range | None) -> np.ndarray:
    """Returns a bool for each line: whether a value is in a range, `at_least` compared with its least, and `exactly`
    with its most. A null is in no range."""
    if limits is None:
        return np.ones(len(at_least), dtype=bool)
    low, high = (column.astype("Float64").to_numpy(dtype=float, na_value=np.nan) for column in (at_least, exactly))
    least, most = limits
    fits = ~np.isnan(low)
    if least is not None:
        fits &= low >= least
    if most is not None:
        fits &= high <= most
    return fits


def searchable(text: str) -> str:
    """Returns a text as a search compares it: spaces as spaces, and in one case."""
    return plain(text).casefold() if text else ""
