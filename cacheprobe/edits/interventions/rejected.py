"""Restricts interventions to the drafts that an earlier run rejected."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import pandas as pd

from cacheprobe.core.records import Request
from cacheprobe.core.values import text_digest
from cacheprobe.edits.interventions.base import Intervention, as_interventions


@runtime_checkable
class RecordedRows(Protocol):
    """Defines the members of a Trace that `on_rejected` uses."""

    @property
    def requests(self) -> Sequence[Request]:
        """All requests of the run."""
        ...

    @property
    def tokens(self) -> Mapping[int, Sequence[int]]:
        """Committed token ids by request."""
        ...

    def rows(self, request_id: int, status: str | None = None) -> pd.DataFrame:
        """Returns the rows table of a request."""
        ...


def on_rejected(trace: RecordedRows, edit: object) -> tuple[Intervention, ...]:
    """Returns interventions that act as `edit`, but only on tokens of drafts that were rejected in `trace`, a run
    without it. Give them to a second run of the same prompts.

    edit: one intervention or several; its positions and phases restrict it further. A token is recognised by its whole
    text, from the prompt's first token on. So the second run may draft at other steps, or other tokens; the edit then
    leaves those alone.
    Raises: ValueError if the trace rejected no draft token that the edit could act on.
    """
    found = []
    for one in (one for given in as_interventions(edit) for one in given.of_requests(len(trace.requests))):
        rows = trace.rows(one.request, "rolled_back")
        rows = rows if one.positions is None else rows[rows.position.isin(one.positions)]
        rows = rows if one.phases is None else rows[rows.phase.isin(one.phases)]
        if texts := texts_of_rows(trace, one.request, set(rows.row)):
            found.append(replace(one, drafts=frozenset(texts.values())))
    if not found:
        raise ValueError("on_rejected: the trace rejected no draft token that the edit could act on; leave it out")
    return tuple(found)


def texts_of_rows(trace: RecordedRows, request_id: int, numbers: Collection[int]) -> dict[int, str]:
    """Returns the digest of the text up to each of these rows' tokens, drafts included, by row number. Leaves out rows
    of drafts that no pass verified."""
    rows, found, before = trace.rows(request_id), dict[int, str](), -1
    whole = [*(trace.requests[request_id].prompt_token_ids or ()), *trace.tokens[request_id]]
    for step, fed in rows[rows.phase == "verify"].sort_values("position").groupby("step"):
        ids = [*whole[: int(fed.position.min())], *map(int, fed.token_id)]
        own = rows[(rows.step > before) & (rows.step <= step) & rows.row.isin(numbers)]
        for row, position, token in zip(own.row, own.position, own.token_id, strict=True):
            if position < len(ids) and ids[position] == token:
                found[int(row)] = text_digest(ids[: position + 1])
        before = step
    return found
