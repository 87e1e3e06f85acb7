"""Measures of a trace's own lens readings, and its states as TransformerLens holds them."""

from typing import TYPE_CHECKING, SupportsIndex

import pandas as pd

from cacheprobe.analysis import measures
from cacheprobe.analysis.layer_choices import agreement_by_layer, prediction_depth_of
from cacheprobe.core.hook_names import PATTERN

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace


def lens_readings(trace: "Trace", include_rolled_back: bool = False) -> pd.DataFrame:
    """Returns the lens readings of `trace.hypotheses()` without thoughts, as the measures by layer require."""
    table = trace.hypotheses(include_rolled_back)
    return table[table.site != "thought"].reset_index(drop=True) if trace.thought_table is not None else table


def agreement(trace: "Trace") -> pd.DataFrame:
    """Returns the share of first choices that equal the committed token, by layer and verdict.

    See `analysis.layer_choices.agreement_by_layer` for the columns.
    """
    return agreement_by_layer(lens_readings(trace))


def prediction_depth(trace: "Trace") -> pd.DataFrame:
    """Returns, for every row, the layer from which its first choice stays, the number of earlier changes, and the
    choices.

    See `analysis.layer_choices.prediction_depth_of` for the columns.
    """
    return prediction_depth_of(lens_readings(trace))


def commitment(trace: "Trace", margin: float = 0.5) -> pd.DataFrame:
    """Returns, for every row, the first layer that is confident by `margin`; columns as in
    `analysis.measures.commitment`."""
    return measures.commitment(lens_readings(trace), margin)


def saturation(trace: "Trace", top: int = 3) -> pd.DataFrame:
    """Returns, for every row, the layer from which each of the last layer's choices stays; as in
    `analysis.measures.saturation`."""
    return measures.saturation(lens_readings(trace), top)


def draft_agreement(trace: "Trace", window: int) -> pd.DataFrame:
    """Returns how many of each layer's draft tokens would be accepted; columns as in
    `analysis.measures.draft_agreement`."""
    return measures.draft_agreement(lens_readings(trace), window)


def to_activation_cache(trace: "Trace", request_id: SupportsIndex) -> object:
    """Returns TransformerLens' ActivationCache of a request's canonical states, [1, position, m] by hook name.

    Heads are [1, position, h, d], patterns [1, h, position, position]. Raises: ValueError without a model or states.
    """
    if trace.model is None:
        raise ValueError("this trace was loaded without its model; use cp.load_trace(dir, model=...)")
    if not trace.store.layers:
        raise ValueError("this run kept no states; run it with S, T or C in capture=")
    rows = trace.rows(request_id, "committed").sort_values("position")
    pairs = [(site, layer) for layer in trace.store.layers for site in (*trace.store.sites, *trace.store.heads)]
    held = {p: trace.pattern(p[1], request_id) if p[0] == PATTERN else trace.vectors(*p, rows) for p in pairs}
    return trace.model.to_activation_cache(held)
