"""Collects drafts before their verification: the row whose state predicted the draft, and the outcome."""

from collections.abc import Iterable

import pandas as pd

from cacheprobe.analysis.reading import read_states
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.trace import Trace


def drafted(trace: Trace, unit: str = "draft") -> pd.DataFrame:
    """Returns a DataFrame with one line for each verified draft, or for each of its tokens up to the first mismatch. A
    line has the outcome, and the row that predicted the draft or token.

    unit: "draft", with the row that predicted its first token; or "candidate", one line for each draft token up to the
    first mismatch, since later tokens follow text that was never committed.
    Columns: request_id, step (of the verdict), row, num_layers (blocks that ran for this row), position (of the first
    draft token), generated (tokens before it), index (of the draft token), length (of the draft), is_rolled_back: for
    unit "draft", whether any of its tokens was rolled back; for "candidate", whether this token was the first mismatch.
    row: number of the newest row before the verification on whose text the draft token depends: of the draft pass that
    proposed it, or, for a drafter that runs no model, of the canonical pass that chose the newest committed token.
    Drafts without a captured row are left out.
    Raises: ValueError for another unit.
    """
    if unit not in ("draft", "candidate"):
        raise ValueError(f"unknown unit {unit!r}; give 'draft' or 'candidate'")
    table = trace.row_table[trace.row_table.state_index >= 0]
    rows_of = dict(list(table.groupby("request_id")))
    prompts = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    verified = trace.event_table[trace.event_table.phase == "verify"].sort_values(["request_id", "step"])
    last_verified_step: dict[int, int] = {}
    records = []
    for event in verified.itertuples():
        last_verified, last_verified_step[event.request_id] = last_verified_step.get(event.request_id, -1), event.step
        length = len(event.draft_token_ids)
        rows = rows_of.get(event.request_id)
        if not length or rows is None:
            continue
        start, accepted = int(event.draft_start), int(event.num_accepted)
        last_index = 0 if unit == "draft" else min(accepted, length - 1)
        is_draft_row = (rows.phase == "decode") & (rows.step > last_verified)
        earlier = rows[(rows.step < event.step) & (is_draft_row | (rows.status == "committed"))]
        for index in range(last_index + 1):
            before_token = earlier[earlier.position < start + index]
            if before_token.empty:
                continue
            row = before_token.sort_values(["position", "step"]).iloc[-1]
            is_rolled_back = accepted < length if unit == "draft" else index == accepted
            records.append(
                (event.request_id, event.step, row.row, row.num_layers, start, start - prompts[event.request_id], index,
                 length, is_rolled_back)
            )  # fmt: skip
    columns = [
        "request_id", "step", "row", "num_layers", "position", "generated", "index", "length", "is_rolled_back",
    ]  # fmt: skip
    return pd.DataFrame(records, columns=columns)


def margins(trace: Trace, rows: Iterable[int], layer: int, model: CachedLM | None = None) -> pd.Series:
    """Returns a Series by row number, for the given rows: the gap in nats between the logit lens's two best tokens at
    `layer`."""
    row_table = trace.row_table[trace.row_table.row.isin(set(rows))]
    read = read_states(trace, LogitLens(), layers=[layer], rows=row_table, model=model)
    best = read.top_logprob_nats.map(lambda nats: float(nats[0] - nats[1]))
    return pd.Series(best.to_numpy(), index=read.row.to_numpy())
