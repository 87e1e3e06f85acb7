"""Compares the log-probabilities of a replayed generation with those that the other program gave."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.schema import typed
from cacheprobe.trace.tables.token_history import token_history

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def engine_differences(trace: "Trace") -> pd.DataFrame:
    """Returns a DataFrame with one line for each token of a trace of `cp.replay`.

    Columns: request_id, position (absolute), token_id, token; logprob_nats under this model, other_logprob_nats as the
    other program gave it (NaN if it did not), difference_nats = this model's minus the other's; rank of the token in
    this model's last layer, 0 for its first choice (missing unless Z of that layer was recorded);
    is_accepted_draft: whether the other program drafted the token (missing for a request without given drafts, and with
    a drafter of one's own).
    Raises: ValueError for a trace of another kind.
    """
    about = _said(trace.meta)
    events, texts = trace.events(), trace.token_texts
    parts = [
        request_differences(about, events[events.request_id == one.request_id], one.request_id, one.num_prompt_tokens)
        for one in trace.requests
    ]
    table = pd.concat(parts, ignore_index=True)
    table["token"] = [texts[token] for token in table.token_id]
    table["rank"] = _ranks(trace, table)
    table["is_accepted_draft"] = _accepted(trace, table).where(table.request_id.isin(about["drafted_requests"]))
    return typed(table, "engine_differences")


def request_differences(
    replay: JsonDict, events: pd.DataFrame, request_id: int, num_prompt_tokens: int
) -> pd.DataFrame:
    """Returns the columns request_id, position, token_id and the three of log-probabilities, for one request.

    replay: the entry "replay" of the metadata.  events: of the request.
    """
    ids = [int(token) for step in events.committed_token_ids for token in step]
    nats = np.array([float(one) for step in events.committed_logprobs_nats for one in step])
    theirs = replay["logprob_nats"].get(str(request_id))
    other = np.full(len(ids), np.nan) if theirs is None else np.array(theirs[: len(ids)], dtype=float)
    return pd.DataFrame(
        {
            "request_id": request_id,
            "position": range(num_prompt_tokens, num_prompt_tokens + len(ids)),
            "token_id": ids,
            "logprob_nats": nats,
            "other_logprob_nats": other,
            "difference_nats": nats - other,
        }
    )


def _said(meta: JsonDict) -> JsonDict:
    """Returns what the other program said. Raises: ValueError for a run that is no replay."""
    if (about := meta.get("replay")) is None:
        raise ValueError(f"this trace is of the kind {meta.get('kind')!r}; make it with cp.replay")
    return about


def difference_line(trace: "Trace") -> str:
    """Returns a sentence on how far the two programs are apart; "" if the other gave no log-probabilities."""
    table = engine_differences(trace).dropna(subset=["difference_nats"])
    if table.empty:
        return ""
    size = table.difference_nats.abs()
    worst = table.loc[size.idxmax()]
    return (
        f"log-probabilities differ from the other program's by {size.mean():.4f} nats on average, and by "
        f"{size.max():.4f} at most, at position {worst.position} of request {worst.request_id}"
    )


def _ranks(trace: "Trace", table: pd.DataFrame) -> pd.Series:
    """Returns the rank of each token in the last layer's readings of S; missing where they were not recorded."""
    missing = pd.Series(pd.NA, table.index, dtype="Int64")
    read = trace.recorded_readings
    if read is None:
        return missing
    last = int(trace.row_table.num_layers.max()) - 1
    read = read[(read.status == "committed") & (read.site == "S") & (read.layer == last)]
    ranks = read.assign(position=read.position + 1)[["request_id", "position", "rank"]]
    return table[["request_id", "position"]].merge(ranks, "left")["rank"].astype("Int64")


def _accepted(trace: "Trace", table: pd.DataFrame) -> pd.Series:
    """Returns whether each token was an accepted draft token."""
    history = token_history(trace.event_table)
    accepted = history[history.outcome == "accepted"]
    lengths = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    positions = accepted.request_id.map(lengths) + accepted.place
    found = set(zip(accepted.request_id, positions, strict=True))
    return pd.Series(list(zip(table.request_id, table.position, strict=True))).isin(found).astype("boolean")
