"""Applies the ledger's changes up to a step: which slots of a request's cache row are in use. Does not import torch."""

from typing import SupportsIndex

import pandas as pd

from cacheprobe.trace.tables.schema import typed


def ledger_at(changes: pd.DataFrame, step: SupportsIndex | None) -> pd.DataFrame:
    """Returns the slots of one request's cache row that are in use after `step`, as a DataFrame.

    Columns: position, provenance (such as "verified"), step of the last write.
    changes: the ledger's lines of this request, in order of step.  step: None for the end.
    """
    slots: dict[int, tuple[str, int]] = {}
    for change in changes.itertuples():
        if step is not None and change.step > step:
            break
        for position in range(change.start, change.end):
            if change.provenance == "free":
                slots.pop(position, None)
            else:
                slots[position] = (change.provenance, change.step)
    lines = [(position, *slots[position]) for position in sorted(slots)]
    return typed(lines, "Trace.ledger")


def rows_in_use(changes: pd.DataFrame) -> pd.DataFrame:
    """Returns the number of cached slots of each request after every step in which the ledger has a change of the
    request, as a DataFrame.

    Columns: request_id, step, rows (the number of slots; 0 if the request freed its cache row in this step).
    changes: the ledger table of a run.
    Twin: `ledger_at` of each request and step, ==.
    """
    records = []
    for request_id, of_request in changes.groupby("request_id", sort=True):
        in_use, num_in_use = bytearray(int(of_request.end.max())), 0
        counts: dict[int, int] = {}
        columns = (of_request[name].tolist() for name in ("step", "start", "end", "provenance"))
        for step, start, end, provenance in zip(*columns, strict=True):
            is_used = provenance != "free"
            num_in_use += is_used * (end - start) - in_use.count(1, start, end)
            in_use[start:end] = (b"\1" if is_used else b"\0") * (end - start)
            counts[step] = num_in_use
        records += [(int(request_id), step, count) for step, count in counts.items()]
    return pd.DataFrame(records, columns=["request_id", "step", "rows"])
