"""Compares two runs from their tables alone, and finds where they first differ. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

StoredRequest: TypeAlias = Mapping[str, Any]
"""A request of `StoredRun.requests`: its fields as JSON."""

_READING = ["token_id", "logprob_nats", "entropy_nats", "rank", "committed_logprob_nats"]


@dataclass(frozen=True, slots=True)
class RequestDifference:
    """Describes how one request differs between two runs: the kind of difference (`what`), and the place of the first
    difference among the generated tokens."""

    request_id: int
    what: str
    """"equal", "tokens", "log-probabilities", "tokens equal" (equal tokens; a run recorded no log-probabilities),
    "prompt" (different prompts), or "missing" (in one run only)."""
    place: int | None = None
    """Index of the first generated token that differs, or whose log-probability differs; counted from 0."""


def compare_requests(
    ours: Sequence[StoredRequest], theirs: Sequence[StoredRequest], our_events: pd.DataFrame,
    their_events: pd.DataFrame,
) -> list[RequestDifference]:  # fmt: skip
    """Returns a list with one RequestDifference for each request number: how the request differs between two runs.

    Tokens are compared only if the prompts are equal; log-probabilities, bit for bit, only if the tokens are equal and
    both runs recorded them.
    ours, theirs: as `StoredRun.requests`.  our_events, their_events: as `Trace.events`.
    """
    differences = []
    logprobs = [_logprobs(events) for events in (our_events, their_events)]
    for request_id in range(max(len(ours), len(theirs))):
        if request_id >= min(len(ours), len(theirs)):
            differences.append(RequestDifference(request_id, "missing"))
            continue
        a, b = ours[request_id], theirs[request_id]
        if a["prompt_token_ids"] != b["prompt_token_ids"]:
            differences.append(RequestDifference(request_id, "prompt"))
        elif (index := first_difference(a["committed_token_ids"], b["committed_token_ids"])) is not None:
            differences.append(RequestDifference(request_id, "tokens", index))
        else:
            pair = [by_request.get(request_id, []) for by_request in logprobs]
            if a["committed_token_ids"] and not all(pair):
                differences.append(RequestDifference(request_id, "tokens equal"))
                continue
            index = first_difference(*pair)
            differences.append(RequestDifference(request_id, "equal" if index is None else "log-probabilities", index))
    return differences


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """Returns the index of the first item in which two sequences differ; None if they are equal.

    An item that only the longer sequence has counts as a difference.
    """
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def first_reading_difference(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[int, int] | None:
    """Returns (position, layer) of the first lens reading whose numbers differ between two requests; None if all are
    equal.

    ours, theirs: readings of one request each, as in `Trace.hypotheses`. All readings of `ours` with status "committed"
    are compared. Null equals null, because the last reading has no committed token to rank.
    """
    keys = ["position", "layer"]
    a, b = (table[table.status == "committed"].set_index(keys)[_READING].sort_index() for table in (ours, theirs))
    b = b.reindex(a.index)
    same = (a == b).fillna(False).to_numpy(dtype=bool) | (a.isna() & b.isna()).to_numpy(dtype=bool)
    if same.all():
        return None
    position, layer = a.index[int((~same.all(axis=1)).argmax())]
    return int(position), int(layer)


def _logprobs(events: pd.DataFrame) -> dict[int, list[float]]:
    """Returns a dict request id -> list of the log-probabilities of the request's committed tokens, in order."""
    by_request: dict[int, list[float]] = {}
    for request_id, nats in zip(events.request_id, events.committed_logprobs_nats, strict=True):
        by_request.setdefault(int(request_id), []).extend(float(x) for x in nats)
    return by_request
