"""Measures each generated token: the outcome of its draft, and what the lens readings that predict it say."""

import pandas as pd

from cacheprobe.trace.tables.draft_verdicts import prediction_depths
from cacheprobe.trace.tables.schema import typed
from cacheprobe.trace.tables.token_history import COMMITTED, token_history


def token_measures(events: pd.DataFrame, readings: pd.DataFrame | None, num_prompt_tokens: int) -> pd.DataFrame:
    """Returns a DataFrame with one line for each generated token of a request.

    Columns: place (0 is the first), position (absolute, of the row that predicts the token), token_id, outcome (as in
    `token_history`), born and decided_step; of the committed row's readings of S: depth (prediction depth, a layer),
    layer (the last one read), entropy and logprob of the committed token (nats), null if they were not read.
    events, readings: of one request.  Twin: tests.twins.measures_slowly.token_measures_slowly, ==.
    """
    history = token_history(events)
    tokens = history[history.outcome.isin(COMMITTED).fillna(False)].sort_values("place", kind="stable")
    tokens = tokens.drop_duplicates("place", keep="last")[["place", "token_id", "outcome", "born", "decided_step"]]
    tokens = tokens.assign(position=tokens.place + num_prompt_tokens - 1)
    if readings is None:
        readings = typed([], "hypotheses")
    read = readings[(readings.status == "committed") & (readings.site != "thought")]
    read = read.assign(depth=prediction_depths(read)).sort_values("layer", kind="stable")
    last = read.drop_duplicates("position", keep="last")[
        ["position", "depth", "layer", "entropy_nats", "committed_logprob_nats"]
    ]
    names = ["position", "depth", "layer", "entropy", "logprob"]
    measures = tokens.merge(last.set_axis(names, axis=1), on="position", how="left")
    return typed(measures, "generated_tokens").drop(columns="token")
