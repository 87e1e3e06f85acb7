"""Drafts before their verification: which state there was, how sure the model was, and what became of the draft."""

from collections.abc import Iterable

import pandas as pd

from cacheprobe.analysis.reading import read_states
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.trace import Trace


def drafted(trace: Trace, unit: str = "draft") -> pd.DataFrame:
    """One line for each draft that reached the verifier, or for each candidate that stood on a committed text.

    unit: "draft", with the state from which its first candidate came; or "candidate": each candidate up to the first
        mismatch, since those behind it follow a text that was never committed.
    Columns: request_id, step (of the verdict), row, num_layers (that ran of it), position (of the first draft token),
    generated (tokens before it), index (of the candidate), length (of the draft), is_rolled_back: whether any of the
    draft was, or whether this candidate was the first mismatch.
    row: the newest row before the verification whose text the candidate goes on from: the draft pass that proposed it,
    or, for a drafter that runs no model, the canonical row that chose the newest committed token.
    Drafts for which no such row was kept are left out.
    """
    if unit not in ("draft", "candidate"):
        raise ValueError(f"unknown unit {unit!r}; give 'draft' or 'candidate'")
    table = trace.row_table[trace.row_table.state_index >= 0]
    rows_of = dict(list(table.groupby("request_id")))
    prompts = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    verified = trace.event_table[trace.event_table.phase == "verify"].sort_values(["request_id", "step"])
    before: dict[int, int] = {}
    records = []
    for event in verified.itertuples():
        since, before[event.request_id] = before.get(event.request_id, -1), event.step
        length = len(event.draft_token_ids)
        rows = rows_of.get(event.request_id)
        if not length or rows is None:
            continue
        start, accepted = int(event.draft_start), int(event.num_accepted)
        last = 0 if unit == "draft" else min(accepted, length - 1)
        own = (rows.phase == "decode") & (rows.step > since)
        known = rows[(rows.step < event.step) & (own | (rows.status == "committed"))]
        for index in range(last + 1):
            read = known[known.position < start + index]
            if read.empty:
                continue
            row = read.sort_values(["position", "step"]).iloc[-1]
            lost = accepted < length if unit == "draft" else index == accepted
            records.append(
                (event.request_id, event.step, row.row, row.num_layers, start, start - prompts[event.request_id], index,
                 length, lost)
            )  # fmt: skip
    columns = [
        "request_id", "step", "row", "num_layers", "position", "generated", "index", "length", "is_rolled_back",
    ]  # fmt: skip
    return pd.DataFrame(records, columns=columns)


def margins(trace: Trace, rows: Iterable[int], layer: int, model: CachedLM | None = None) -> pd.Series:
    """By row: nats between the two best tokens of its reading by the logit lens at `layer`."""
    about = trace.row_table[trace.row_table.row.isin(set(rows))]
    read = read_states(trace, LogitLens(), layers=[layer], rows=about, model=model)
    best = read.top_logprob_nats.map(lambda nats: float(nats[0] - nats[1]))
    return pd.Series(best.to_numpy(), index=read.row.to_numpy())
