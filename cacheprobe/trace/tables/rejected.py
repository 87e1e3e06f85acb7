"""Lists every rejected draft of a run: what was drafted, what was committed instead, and which layers decided."""

from typing import TYPE_CHECKING

import pandas as pd

from cacheprobe.trace.tables.draft_verdicts import drafts_table, prediction_depths

if TYPE_CHECKING:
    from cacheprobe.trace.data import TraceData

TOKENS_AROUND = 8
"""Number of tokens before the rejected one whose text the list shows."""
_TYPES = {
    **dict.fromkeys(("request_id", "step", "position", "drafted_token_id", "drafted_step", "num_rolled_back"), "int64"),
    **dict.fromkeys(("drafted_token", "committed_token", "text_before"), "object"),
    **dict.fromkeys(("committed_token_id", "drafter_layer", "flip_layer"), "Int64"),
    **dict.fromkeys(("margin_nats", "margin_at_least_nats"), "Float64"),
}
"""Type of each column of `rejected_of`."""
REJECTED_COLUMNS = [
    "request_id", "step", "position", "drafted_token_id", "drafted_token", "committed_token_id", "committed_token",
    "num_rolled_back", "drafted_step", "drafter_layer", "flip_layer", "margin_nats", "margin_at_least_nats",
    "text_before",
]  # fmt: skip


def rejected_of(trace: "TraceData") -> pd.DataFrame:
    """Returns the table of `Trace.rejected`: a DataFrame with one line for each rejected draft, by request and step.

    Needs no model, unless Z is not read yet. A run without lens readings has no flip_layer and no margins.
    Twin: tests.twins.rejected_slowly, ==.
    """
    drafts = drafts_table(trace.event_table)
    drafts = drafts[drafts.verdict == "rejected"]
    if drafts.empty:
        return pd.DataFrame(columns=REJECTED_COLUMNS).astype(_TYPES)
    lengths = {request.request_id: request.num_prompt_tokens for request in trace.requests}
    position = drafts.request_id.map(lengths) + drafts.place
    table = pd.DataFrame(
        {
            "request_id": drafts.request_id,
            "step": drafts.judged.astype("int64"),
            "position": position,
            "drafted_token_id": drafts.drafted_token_id,
            "drafted_step": drafts.born,
        }
    )
    events = trace.event_table[["request_id", "step", "num_rolled_back"]]
    table = table.merge(events, on=["request_id", "step"], how="left", validate="one_to_one")
    texts = trace.token_texts
    tokens = {request_id: _tokens_of(trace, request_id) for request_id in table.request_id.unique().tolist()}
    places = [(tokens[request_id], at) for request_id, at in zip(table.request_id, table.position, strict=True)]
    committed = [ids[at] if at < len(ids) else None for ids, at in places]
    table["drafted_token"] = [texts.get(token, f"<{token}>") for token in table.drafted_token_id]
    table["committed_token_id"] = pd.array(committed, dtype="Int64")
    table["committed_token"] = [None if token is None else texts.get(token, f"<{token}>") for token in committed]
    before = [ids[max(at - TOKENS_AROUND, 0) : at] for ids, at in places]
    table["text_before"] = ["".join(texts.get(token, f"<{token}>") for token in ids) for ids in before]
    table["drafter_layer"] = _drafter_layers(trace, table)
    table = table.join(_layers_that_decided(trace, table))
    return table.sort_values(["request_id", "step"], ignore_index=True)[REJECTED_COLUMNS].astype(_TYPES)


def _tokens_of(trace: "TraceData", request_id: int) -> list[int]:
    """Returns the token ids of a request: its prompt, and what it committed."""
    return [*trace.requests[request_id].prompt_token_ids, *trace.tokens[request_id]]


def _drafter_layers(trace: "TraceData", table: pd.DataFrame) -> pd.api.extensions.ExtensionArray:
    """Returns the last layer of the pass that drafted each token; null for a draft of all layers or of no pass."""
    rows = trace.row_table
    early = rows[rows.num_layers < rows.num_layers.max()]
    predicting = early.assign(position=early.position + 1, drafted_step=early.step, drafter_layer=early.num_layers - 1)
    keys = ["request_id", "drafted_step", "position"]
    found = table[keys].merge(predicting[[*keys, "drafter_layer"]].drop_duplicates(keys), on=keys, how="left")
    return pd.array(found.drafter_layer, dtype="Int64")


def _layers_that_decided(trace: "TraceData", table: pd.DataFrame) -> pd.DataFrame:
    """Returns flip_layer and both margins of each line, from the readings of the verify row that judged the draft."""
    names = ("flip_layer", "margin_nats", "margin_at_least_nats")
    nothing = pd.DataFrame(dict.fromkeys(names, pd.NA), index=table.index)
    readings = trace.hypothesis_table
    if readings is None:
        return nothing
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
    found = dict(zip(names, (flips, *margins), strict=True))
    return pd.DataFrame(found, index=table.index)
