"""Lists every rejected draft of a run: what was drafted, what was committed instead, and which layers decided."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from cacheprobe.trace.tables.draft_verdicts import prediction_depths
from cacheprobe.trace.tables.schema import token_text, typed

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData

TOKENS_AROUND = 8
"""Number of tokens before the rejected one whose text the list shows."""
DECIDED_COLUMNS = ["flip_layer", "margin_nats", "margin_at_least_nats"]
"""Columns that need lens readings."""
DECIDING_COLUMNS = ["row", "request_id", "step", "position", "layer", "token_id", "committed_token_id",
                    "committed_logprob_nats", "top_token_ids", "top_logprob_nats"]  # fmt: skip
"""Columns of the lens readings that `layers_that_decided` needs."""


def rejected_of(trace: "TraceData", request_id: int | None = None) -> pd.DataFrame:
    """Returns the table of `Trace.rejected`: a DataFrame with one line for each rejected draft, by request and step.

    request_id: only this request's lines; None for all.
    Needs no model, unless Z is not read yet. A run without lens readings has no flip_layer and no margins.
    Twin: tests.twins.rejected_slowly, ==.
    """

    def own(name: str, table: pd.DataFrame) -> pd.DataFrame:
        """Returns the request's lines of a table, or all. name: of its index in the trace."""
        return table if request_id is None else trace.lookup[name].lines_of(table, request_id)

    prompts = {request.request_id: request.prompt_token_ids for request in trace.requests}
    events, rows = own("events", trace.event_table), own("rows", trace.row_table)
    table = rejected_drafts(events, rows, prompts, trace.tokens, trace.token_texts)
    readings = None if table.empty else trace.hypothesis_table
    readings = None if readings is None else own("recorded readings", readings)
    return with_layers(table, None if readings is None else layers_that_decided(table, readings))


def rejected_drafts(
    events: pd.DataFrame,
    rows: pd.DataFrame,
    prompts: Mapping[int, Sequence[int]],
    tokens: Mapping[int, Sequence[int]],
    texts: Mapping[int, str],
) -> pd.DataFrame:
    """Returns the columns of `Trace.rejected` that need no lens readings: a DataFrame with one line for each rejected
    draft, by request and step.

    events, rows: as in `Trace.events` and `Trace.rows`.  prompts, tokens: token ids by request, of its prompt and of
    what it committed.  texts: by token id.
    """
    table = rejections(events)
    whole = {
        request_id: [*prompts[request_id], *tokens[request_id]] for request_id in table.request_id.unique().tolist()
    }
    places = [(whole[request_id], at) for request_id, at in zip(table.request_id, table.position, strict=True)]
    committed = [ids[at] if at < len(ids) else None for ids, at in places]
    table["drafted_token"] = [token_text(texts, token) for token in table.drafted_token_id]
    table["committed_token_id"] = pd.array(committed, dtype="Int64")
    table["committed_token"] = [None if token is None else token_text(texts, token) for token in committed]
    before = [ids[max(at - TOKENS_AROUND, 0) : at] for ids, at in places]
    table["text_before"] = ["".join(token_text(texts, token) for token in ids) for ids in before]
    table["drafter_layer"] = _drafter_layers(rows, table)
    return typed(table, "Trace.rejected").drop(columns=DECIDED_COLUMNS)


def rejections(events: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each rejected draft, by request and step.

    Columns: request_id; step, of the verify pass; position and drafted_token_id, of the first draft token that the
    verifier did not choose; chain_step, its number in its draft, from 1; num_rolled_back, this token and those behind
    it; drafted_step, in which it was drafted.
    events: as in `Trace.events`.
    """
    events = events.sort_values(["request_id", "step"], kind="stable")
    accepted = events.num_accepted.fillna(-1).to_numpy(dtype=np.int64)
    drafted, num_drafted = joined(events.draft_token_ids)
    _, num_proposed = joined(events.proposed_token_ids)
    lost = np.flatnonzero((accepted >= 0) & (accepted < num_drafted))
    kept, count, ends = accepted[lost], num_drafted[lost], np.cumsum(num_drafted)[lost]
    # a draft that is judged consists of the request's newest proposals
    proposal = np.cumsum(num_proposed)[lost] - count + kept
    return pd.DataFrame(
        {
            "request_id": events.request_id.to_numpy()[lost],
            "step": events.step.to_numpy()[lost],
            "position": events.draft_start.fillna(0).to_numpy(dtype=np.int64)[lost] + kept,
            "drafted_token_id": drafted[ends - count + kept],
            "chain_step": kept + 1,
            "num_rolled_back": count - kept,
            "drafted_step": np.repeat(events.step.to_numpy(), num_proposed)[proposal],
        }
    )


def joined(lists: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """Returns (all numbers of a column of lists, one after the other; how many each list has)."""
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    return np.concatenate([np.empty(0, np.int64), *lists[counts > 0]]), counts


def with_layers(table: pd.DataFrame, decided: pd.DataFrame | None) -> pd.DataFrame:
    """Returns the table of `Trace.rejected`: `table` with the columns of `decided` joined to it.

    table: from `rejected_drafts`.  decided: from `layers_that_decided`; if it is None, the columns that it would add
    are null.
    """
    return typed(table if decided is None else table.join(decided), "Trace.rejected")


def judging_rows(table: pd.DataFrame, rows: pd.DataFrame) -> pd.Series:
    """Returns the number of the row that judged each rejected draft: of the verify pass, one position before the draft.
    A Series of Int64 with the index of `table`, from `rejected_drafts`; null if there is no such row."""
    keys = ["request_id", "step", "position"]
    wanted = table[keys].assign(position=table.position - 1)
    found = wanted.merge(rows[[*keys, "row"]].drop_duplicates(keys), on=keys, how="left")
    return pd.Series(pd.array(found.row, dtype="Int64"), index=table.index)


def _drafter_layers(rows: pd.DataFrame, table: pd.DataFrame) -> pd.api.extensions.ExtensionArray:
    """Returns the last layer of the pass that drafted each token; null for a draft of all layers or of no pass."""
    early = rows[rows.num_layers < rows.num_layers.max()]
    predicting = early.assign(position=early.position + 1, drafted_step=early.step, drafter_layer=early.num_layers - 1)
    keys = ["request_id", "drafted_step", "position"]
    found = table[keys].merge(predicting[[*keys, "drafter_layer"]].drop_duplicates(keys), on=keys, how="left")
    return pd.array(found.drafter_layer, dtype="Int64")


def layers_that_decided(table: pd.DataFrame, readings: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with the index of `table` and the columns flip_layer, margin_nats and margin_at_least_nats
    that `Trace.rejected` defines, from the readings of the verify row that judged the draft. All three are null if that
    row has no reading.

    table: from `rejected_drafts`.  readings: with `DECIDING_COLUMNS`.
    """
    nothing = pd.DataFrame(dict.fromkeys(DECIDED_COLUMNS, pd.NA), index=table.index)
    judging = pd.DataFrame(
        {
            "line": table.index,
            "request_id": table.request_id,
            "step": table.step,
            "position": table.position - 1,
            "drafted": table.drafted_token_id,
        }
    )
    found = readings.merge(judging, on=["request_id", "step", "position"])
    if found.empty:
        return nothing
    found["depth"] = prediction_depths(found)
    last = found.sort_values("layer").drop_duplicates("line", keep="last").set_index("line")
    flips = last.depth.where((last.token_id == last.committed_token_id).fillna(False))
    drafted = [
        nats[ids == token][0] if token in ids else None
        for token, ids, nats in zip(last.drafted, last.top_token_ids, last.top_logprob_nats, strict=True)
    ]
    largest = [nats[-1] if known is None else known for known, nats in zip(drafted, last.top_logprob_nats, strict=True)]
    margins = [last.committed_logprob_nats - pd.array(of, dtype="Float64") for of in (drafted, largest)]
    found = dict(zip(DECIDED_COLUMNS, (flips, *margins), strict=True))
    return pd.DataFrame(found, index=table.index)
