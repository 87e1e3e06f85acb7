"""Applies the ledger's changes up to a step: which cache rows a request held, and how many. Loads no torch."""

from typing import SupportsIndex

import pandas as pd


def ledger_at(changes: pd.DataFrame, step: SupportsIndex | None) -> pd.DataFrame:
    """Returns one request's cache rows after `step` (None: at the end): position, provenance, step of the last
    write.
    """
    held: dict[int, tuple[str, int]] = {}
    for change in changes.itertuples():
        if step is not None and change.step > step:
            break
        for position in range(change.start, change.end):
            if change.provenance == "free":
                held.pop(position, None)
            else:
                held[position] = (change.provenance, change.step)
    return pd.DataFrame(
        [(position, *held[position]) for position in sorted(held)], columns=["position", "provenance", "step"]
    )


def rows_in_use(changes: pd.DataFrame) -> pd.DataFrame:
    """Returns the number of cache rows held after every step that changed it: request_id, step, rows.

    changes: the ledger table of a run. A request that freed its cache rows holds none from then on.
    Twin: `ledger_at` of each request and step, ==.
    """
    records = []
    for request_id, own in changes.groupby("request_id", sort=True):
        held = bytearray(int(own.end.max()))
        counts: dict[int, int] = {}
        columns = (own[name].tolist() for name in ("step", "start", "end", "provenance"))
        for step, start, end, provenance in zip(*columns, strict=True):
            held[start:end] = (b"\0" if provenance == "free" else b"\1") * (end - start)
            counts[step] = held.count(1)
        records += [(int(request_id), step, rows) for step, rows in counts.items()]
    return pd.DataFrame(records, columns=["request_id", "step", "rows"])
