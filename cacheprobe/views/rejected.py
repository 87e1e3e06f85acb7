"""Lists rejected drafts: for the dashboard, where the list is sorted, searched and paged, and for a report or a
terminal."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, lru_cache
from itertools import accumulate
from threading import Lock, Thread
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from cacheprobe.core.terminal import Listing
from cacheprobe.core.values import TableLine
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.rejected import (
    DECIDED_COLUMNS,
    DECIDING_COLUMNS,
    judging_rows,
    layers_that_decided,
    rejected_drafts,
    with_layers,
)
from cacheprobe.views.report.page import table
from cacheprobe.views.text import counted, plain, shorten, text_of, visible

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


LINES_A_PAGE = 50
COLUMNS = {
    "drafted": ("drafted", "drafted_token"),
    "committed": ("committed", "committed_token"),
    "request": ("request", "request_id"),
    "step": ("step", "step"),
    "position": ("position", "position"),
    "drafter": ("drafter’s layer", "drafter_layer"),
    "flip": ("committed first from layer", "flip_layer"),
    "margin": ("margin, nats", "margin_at_least_nats"),
}
"""Heading and column of the table, by the key in the page's address by which the list is sorted."""
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
    """Key of COLUMNS, with "-" in front for the largest first; "" for the order of requests and steps."""
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

    def conditions(self) -> tuple[str, str]:
        """Returns conditions on the lines of `Trace.rejected`, for `DataFrame.query`: those on columns that need no
        lens readings, and those on the others; "" for none."""
        known = [] if self.request is None else [f"request_id == {self.request}"]
        if self.drafter is not None:
            known.append("drafter_layer.isna()" if self.drafter == -1 else f"drafter_layer == {self.drafter}")
        decided = (
            ["flip_layer.isna()"] if isinstance(self.flips, str) else _within("flip_layer", "flip_layer", self.flips)
        )
        decided += _within("margin_at_least_nats", "margin_nats", self.margin)
        return " and ".join(known), " and ".join(decided)


def _within(low: str, high: str, limits: Range | str | None) -> list[str]:
    """Returns the conditions of a range: column `low` has its least, column `high` its most. A null is in no range."""
    if not isinstance(limits, tuple):
        return []
    least, most = limits
    ends = ("" if least is None else f"{low} >= {least}", "" if most is None else f"{high} <= {most}")
    return [f"{low}.notna()", *filter(None, ends)]


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
        known, decided = selection.conditions()
        drafts = self.drafts.query(known, engine="python") if known else self.drafts
        kept = drafts.index.to_numpy()
        if selection.find:
            kept = kept[self._has(searchable(selection.find))[kept]]
        if decided:
            table = self.table(kept.tolist()).reset_index(drop=True)
            kept = kept[table.query(decided, engine="python").index]
        if selection.sort:
            kept = kept[self._order(kept, selection.sort)]
        return tuple(kept.tolist())

    def _order(self, lines: np.ndarray, sort: str) -> np.ndarray:
        """Returns the order of lines, as places among them; unknown values come last."""
        column = COLUMNS[sort.removeprefix("-")][1]
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


def searchable(text: str) -> str:
    """Returns a text as a search compares it: spaces as spaces, and in one case."""
    return plain(text).casefold() if text else ""


_HEADINGS = (
    "request", "step", "position", "text before", "drafted", "committed", "tokens lost", "drafted in step",
    "drafter's layer", "committed first from layer", "margin, nats",
)  # fmt: skip
FLIP_WORDS = (
    "The committed token is the lens’s first choice from the named layer up to the last one; “never”: it is not the "
    "last layer’s."
)
"""Text that explains the column "committed first from layer"."""
_WIDTH = 32
"""Largest width of the text before a token, and of a token, in columns of a monospaced font."""
_MOST = 500
"""Largest number of lines in a report."""


def cells_of(line: TableLine) -> dict[str, object]:
    """Returns the cells of one line of `Trace.rejected` by the keys of COLUMNS; "—" for null."""
    drafter = "—" if pd.isna(line.drafter_layer) else int(line.drafter_layer)
    flip, margin = "—", "—"  # without lens readings
    if not pd.isna(line.margin_at_least_nats):
        flip = "never" if pd.isna(line.flip_layer) else int(line.flip_layer)
        margin = f"{'> ' * bool(pd.isna(line.margin_nats))}{line.margin_at_least_nats:.2f}"
    tokens = (quoted(line.drafted_token), quoted(line.committed_token))
    values = (*tokens, line.request_id, line.step, line.position, drafter, flip, margin)
    return dict(zip(COLUMNS, values, strict=True))


def _rejections(table: pd.DataFrame) -> list[list[object]]:
    """Returns one line of cells, in the order of _HEADINGS, for each line of `Trace.rejected`."""
    lines: list[list[object]] = []
    for line in table.itertuples():
        cells, before = cells_of(line), shorten(plain(line.text_before)[::-1], _WIDTH)[::-1]
        first = [*(cells[key] for key in ("request", "step", "position")), before, cells["drafted"], cells["committed"]]
        rest = [cells[key] for key in ("drafter", "flip", "margin")]
        lines.append([*first, line.num_rolled_back, line.drafted_step, *rest])
    return lines


def rejections_listing(trace: "Trace", request_id: int | None = None) -> Listing:
    """Returns a `Listing` with the rejected drafts of a run, or of one request. Raises: KeyError for a request that the
    trace does not have."""
    found = trace.rejected()
    if request_id is not None:
        trace.committed(request_id)
        found = found[found.request_id == request_id]
    rows = [tuple(map(str, line)) for line in _rejections(found)]
    return Listing("rejected drafts", _HEADINGS, rows, "" if rows else "no draft was rejected")


def rejections_section(trace: "Trace") -> str:
    """Returns HTML with the rejected drafts of all requests of a run."""
    found, head = trace.rejected(), "<h2>Every rejected draft</h2>"
    if found.empty:
        return f"{head}<p class='note'>No draft of this run was rejected.</p>"
    more = f" The first {_MOST} of {len(found):,} are shown." if len(found) > _MOST else ""
    note = (
        f"<p class='note'>Each line is the first token of a draft that the verifier did not choose. {FLIP_WORDS} The "
        "margin is how much more log-probability the last layer gives to the committed token; “&gt;” says that the "
        f"draft token is not among the top tokens read. “—”: not known, or a draft of all layers or of none.{more}</p>"
    )
    num_requests = found.request_id.nunique()
    summary = f"{len(found):,} rejected draft{'s' * (len(found) != 1)} in {counted(num_requests, 'request')}"
    lines = table(list(_HEADINGS), _rejections(found.iloc[:_MOST]))
    return f"{head}{note}<details open><summary>{summary}</summary>{lines}</details>"


def quoted(token: object) -> str:
    """Returns a token's text in quotation marks, cut to a width; "—" for a null."""
    return "—" if not isinstance(token, str) else f"“{shorten(visible(token), _WIDTH)}”"
