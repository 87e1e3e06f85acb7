"""Computes measures of a trace's own lens readings, and exports its states to TransformerLens."""

from typing import TYPE_CHECKING, SupportsIndex

import pandas as pd

from cacheprobe.analysis import measures
from cacheprobe.analysis.measures import agreement_by_layer, prediction_depth_of
from cacheprobe.core.hook_names import PATTERN
from cacheprobe.trace.tables.draft_verdicts import token_measures
from cacheprobe.trace.tables.schema import typed
from cacheprobe.trace.tables.token_history import standing_at, token_history, tokens_with_texts

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def lens_readings(trace: "Trace", include_rolled_back: bool = False) -> pd.DataFrame:
    """Returns the lens readings of `trace.hypotheses(include_rolled_back)` as a DataFrame, without thoughts."""
    table = trace.hypotheses(include_rolled_back)
    return table[table.site != "thought"].reset_index(drop=True) if trace.thought_table is not None else table


def tokens_at(trace: "Trace", step: SupportsIndex) -> pd.DataFrame:
    """Returns the generated tokens as they stand after a step: a DataFrame with one line for each request and place (0
    is the first generated token).

    Columns: request_id, place, token_id, margin_nats, born, decided_step, outcome and state, as in
    `trace.tables.token_history.standing_at`; token, its text.
    """
    standing = standing_at(token_history(trace.event_table), int(step))
    return typed(tokens_with_texts(standing, trace.token_texts), "tokens_at")


def generated_tokens(trace: "Trace", request_id: SupportsIndex) -> pd.DataFrame:
    """Returns a DataFrame with one line for each generated token of a request: the outcome of its draft, and what the
    recorded lens readings that predict it say.

    Columns: as in `trace.tables.token_measures.token_measures`; token, its text. Raises: KeyError for a request that
    the trace does not have.
    """
    number, events, table = int(request_id), trace.event_table, trace.hypothesis_table
    trace.committed(number)
    readings = None if table is None else table[table.request_id == number]
    num_prompt_tokens = len(trace.requests[number].prompt_token_ids)
    measures = token_measures(events[events.request_id == number], readings, num_prompt_tokens)
    return typed(tokens_with_texts(measures, trace.token_texts), "generated_tokens")


def agreement(trace: "Trace") -> pd.DataFrame:
    """Returns a DataFrame of shares, layer (index) by verdict (columns): how often the first choice of a trace's lens
    readings is the committed token.

    Columns: as in `analysis.measures.agreement_by_layer`.
    """
    return agreement_by_layer(lens_readings(trace))


def prediction_depth(trace: "Trace") -> pd.DataFrame:
    """Returns a DataFrame with one line for each row: its prediction depth, its number of changed first choices, and
    these choices.

    Prediction depth: the layer from which the first choice stays. The choices are one text, in order. Columns: as in
    `analysis.measures.prediction_depth_of`.
    """
    return prediction_depth_of(lens_readings(trace))


def commitment(trace: "Trace", margin: float = 0.5) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row: the first layer whose first choice leads the second by at least
    `margin`.

    margin: a difference of probabilities. Columns: as in `analysis.measures.commitment`; the layer is null if there is
    none.
    """
    return measures.commitment(lens_readings(trace), margin)


def saturation(trace: "Trace", top: int = 3) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row: the layer from which each of the last layer's `top` choices keeps
    its rank.

    Columns: as in `analysis.measures.saturation`.
    """
    return measures.saturation(lens_readings(trace), top)


def draft_agreement(trace: "Trace", window: int) -> pd.DataFrame:
    """Returns a DataFrame with one line for each layer: how many tokens would be accepted if the layer drafted the
    run's text.

    window: tokens of one verify pass. Columns: as in `analysis.measures.draft_agreement`.
    """
    return measures.draft_agreement(lens_readings(trace), window)


def to_activation_cache(trace: "Trace", request_id: SupportsIndex) -> object:
    """Returns a request's captured states as a TransformerLens ActivationCache, [1, position, m] by hook name.

    The states are those of status "committed", one for each position. Heads are [1, position, h, d], patterns [1, h,
    position, position].
    Raises: ValueError if the trace has no model or no states, or if a position was not captured.
    """
    if trace.model is None:
        raise ValueError("this trace was loaded without its model; use cp.load_trace(dir, model=...)")
    if not trace.store.layers:
        raise ValueError("this run kept no states; run it with S, T or C in capture=")
    rows = trace.rows(request_id, "committed").sort_values("position")
    pairs = [(site, layer) for layer in trace.store.layers for site in (*trace.store.sites, *trace.store.heads)]
    states = {p: trace.pattern(p[1], request_id) if p[0] == PATTERN else trace.vectors(*p, rows) for p in pairs}
    return trace.model.to_activation_cache(states)
