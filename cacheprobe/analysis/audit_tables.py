"""Checks the ledger, the lens readings and the row numbers of a trace, for `analysis.audit`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from cacheprobe.core.records import PROVENANCES, Request
from cacheprobe.trace.trace import Trace

_COPIED = ("request_id", "step", "phase", "role", "status", "position")
"""Columns of a reading that repeat its row."""


def ledger_faults(trace: Trace, request: Request, verdicts: Mapping[int, tuple[int, int, list[int]]]) -> Iterator[str]:
    """Yields an error text for each fault of a request's cache changes, such as one that no pass explains, or a missing
    one.

    After the request was preempted, unexplained changes are accepted, because the passes that rebuild its cache leave
    no rows. If the request's cache was edited, or the run used a snapshot, no change counts as unexplained or missing.
    verdicts: as in `audit.History.verdicts`.
    """
    changes = trace.ledger_table[trace.ledger_table.request_id == request.request_id]
    wanted = _wanted_changes(trace, request, verdicts)
    preempted_at = {step for number, step in trace.meta["preemptions"] if number == request.request_id}
    is_edited = any(change == "edited" for change in changes.provenance) or "cached" in trace.fingerprint
    length = 0
    for change in changes.itertuples():
        label = f"step {change.step}: slots {change.start} to {change.end - 1} {change.provenance}:"
        if change.provenance not in PROVENANCES or not 0 <= change.start < change.end:
            yield f"{label} no such change"
        elif change.provenance == "free":
            if change.end != length:
                yield f"{label} it held {length}"
            length = change.start
            continue
        elif change.start > length:
            yield f"{label} it held {length}, so slots before them were never written"
        elif change.provenance == "verified" and change.step in verdicts and change.start != length:
            yield f"{label} it still held {length}"
        length = max(length, change.end)
        key = (change.step, change.start, change.end, change.provenance)
        if wanted[key]:
            wanted[key] -= 1
        elif not is_edited and not (preempted_at and change.step > min(preempted_at)):
            yield f"{label} no pass wrote them"
    for (step, start, end, provenance), count in wanted.items():
        if count and not is_edited:
            yield f"step {step}: slots {start} to {end - 1} {provenance}: the change is missing"


def _wanted_changes(
    trace: Trace, request: Request, verdicts: Mapping[int, tuple[int, int, list[int]]]
) -> Counter[tuple[int, int, int, str]]:
    """Returns a Counter of the cache changes (step, start, end, provenance) that rows and verdicts imply."""
    rows = trace.row_table[trace.row_table.request_id == request.request_id]
    events = trace.event_table[trace.event_table.request_id == request.request_id]
    changes: Counter[tuple[int, int, int, str]] = Counter()
    read_at = events[events.phase == "prefill"].step
    prefill = rows[rows.phase == "prefill"]
    own_prefill = prefill[prefill.step.isin(read_at)]
    if len(own_prefill):
        for step, of_step in own_prefill.groupby("step"):
            changes[int(step), int(of_step.position.min()), int(of_step.position.max()) + 1, "prefill"] += 1
    elif len(prefill) and len(read_at):  # the prompt's keys and values were copied from a request with the same prompt
        changes[int(read_at.iloc[0]), 0, request.num_prompt_tokens, "prefill"] += 1
    committed = {int(event.step): len(event.committed_token_ids) for event in events.itertuples()}
    for step, (start, _, _) in verdicts.items():
        changes[step, start - 1, start - 1 + committed[step], "verified"] += 1
    for row in rows[
        (rows.phase == "decode") | ((rows.phase == "verify") & ~rows.step.isin(list(verdicts)))
    ].itertuples():
        provenance = "decoded" if row.status == "committed" else "provisional"
        changes[row.step, row.position, row.position + 1, provenance] += 1
    return changes


def numbering_faults(trace: Trace) -> Iterator[str]:
    """Yields error texts, each to follow "rows: ", on row numbers that are not 0, 1, 2, ... and on wrong values of
    state_index. Also yields one if prefill and verify passes ran different numbers of layers."""
    rows = trace.row_table
    if rows.row.tolist() != list(range(len(rows))):
        yield "are not numbered from 0 without gaps: a row is missing or stands twice"
    indices = np.unique(rows.state_index[rows.state_index >= 0].to_numpy())
    store = trace.store
    num_stored = store.num_rows() if store.sites else len(indices)
    if indices.tolist() != list(range(num_stored)):
        yield f"name {len(indices)} stored vectors, there are {num_stored}: a row is missing, or a state_index is wrong"
    full_passes = rows[rows.phase != "decode"]
    if full_passes.num_layers.nunique() > 1:
        yield "of prefill and verify passes disagree about the number of layers"


def hypothesis_faults(trace: Trace, texts: Mapping[int, Sequence[int]]) -> Iterator[str]:
    """Yields an error text for each contradiction between a lens reading and its row or the committed text, and for
    missing readings.

    texts: prompt and committed token ids, by request.
    """
    table, rows = trace.hypothesis_table, trace.row_table
    if table is None:
        return
    about = rows.set_index("row").reindex(table.row)
    for name in _COPIED:
        for line in _unequal(table[name], about[name]):
            given, wanted = table[name].iloc[line], about[name].iloc[line]
            yield f"{_reading_label(table, line)}: {name} is {given}, its row has {wanted}"
    next_token = [
        texts[r][p + 1] if p + 1 < len(texts[r]) else None
        for r, p in zip(table.request_id, table.position, strict=True)
    ]
    wanted = pd.Series(next_token, dtype="Int64")
    for line in _unequal(table.committed_token_id, wanted):
        given = table.committed_token_id.iloc[line]
        yield f"{_reading_label(table, line)}: committed_token_id is {given}, the text has {wanted[line]}"
    is_same = table.token_id.to_numpy() == wanted.fillna(-1).to_numpy()
    agrees = pd.Series(is_same).astype("boolean").where(wanted.notna())
    for line in _unequal(table.agrees, agrees):
        yield f"{_reading_label(table, line)}: agrees is {table.agrees.iloc[line]}, the tokens give {agrees[line]}"
    for ours, top in (("token_id", "top_token_ids"), ("logprob_nats", "top_logprob_nats")):
        first = pd.Series([values[0] for values in table[top]])
        for line in _unequal(table[ours], first):
            given = table[ours].iloc[line]
            yield f"{_reading_label(table, line)}: {ours} is {given}, the first of {top} is {first[line]}"
    for line in np.flatnonzero(table["rank"].isna().to_numpy() != wanted.isna().to_numpy()):
        yield f"{_reading_label(table, int(line))}: rank is {table['rank'].iloc[line]}"
    yield from _missing_readings(trace, table)


def _missing_readings(trace: Trace, table: pd.DataFrame) -> Iterator[str]:
    """Yields an error text for each row with another number of readings than of captured layers that ran, and one if a
    row has two readings of one layer."""
    rows, capture = trace.row_table, trace.meta["capture"]
    prompts = rows.request_id.map({r.request_id: r.num_prompt_tokens for r in trace.requests})
    is_read = (rows.position >= prompts - 1) | bool(capture["prompt_hypotheses"])
    for name in ("positions", "phases"):
        if capture[name] is not None:
            is_read &= rows[name[:-1]].isin(list(capture[name]))
    if capture.get("statuses") or capture.get("keep"):  # a verdict that a kill took away is in no table
        is_read &= rows.state_index >= 0
    is_read &= rows.position % capture.get("every", 1) == 0
    layers = np.asarray(capture["layers"])
    expected = {int(r.row): int((layers < r.num_layers).sum()) for r in rows[is_read].itertuples()}
    counts = Counter(table.row.tolist())
    if table.duplicated(["row", "layer"]).any():
        yield "a reading stands twice"
    for row, count in expected.items():
        if counts[row] != count:
            yield f"row {row} has {counts[row]} readings, {count} layers were read"


def _unequal(ours: pd.Series, theirs: pd.Series) -> list[int]:
    """Returns the indices of the lines in which two columns differ; null equals null."""
    a, b = ours.reset_index(drop=True), theirs.reset_index(drop=True)
    same = (a == b).fillna(False).to_numpy(dtype=bool) | (a.isna() & b.isna()).to_numpy(dtype=bool)
    return np.flatnonzero(~same).tolist()


def _reading_label(table: pd.DataFrame, line: int) -> str:
    """Returns text that identifies a reading: its request, step, position and layer."""
    at = table.iloc[line]
    return f"request {at.request_id} step {at.step} position {at.position} layer {at.layer}"
