"""Computes measures of each layer's first choice from the table of lens readings; returns tables."""

import pandas as pd

from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.trace.tables.draft_verdicts import by_verdict, prediction_depths
from cacheprobe.trace.tables.schema import typed


def agreement_by_layer(hypotheses: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame of shares, layer (index) by verdict (columns): how often a reading's first choice is the
    committed token.

    Columns: accepted, rejected, never_judged, for positions with a draft token of this verdict; not_drafted, for
    positions for which the row's pass had no draft token. `draft_verdicts.by_verdict` defines which rows count.
    Source: "accuracy of the hidden predictions" of the logit lens.
    """
    return by_verdict(hypotheses).groupby(["layer", "verdict"]).agrees.mean().unstack()


def prediction_depth_of(hypotheses: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each row: its prediction depth, and the first choices of its layers in
    order.

    prediction_depth: first layer from which the first choice stays that of the last layer read (Baldock et al. 2021).
    num_flips: changes of first choice between adjacent layers.  path: the first choices in order, as one text; a choice
    that the next layer keeps is written once.
    final_token: the last layer's first choice.  agrees: whether `final_token` is the committed token; null if none was
    committed.
    hypotheses: as from `Trace.hypotheses`.
    Raises: ValueError if there are none.
    Source: as for `draft_verdicts.prediction_depths`, which computes the depth.
    Twin: tests.twins.measures_slowly.prediction_depth_slowly, ==.
    """
    if hypotheses.empty:
        raise ValueError("there are no hypotheses; capture must include Z")
    # the other columns are equal in all readings of a row
    table = hypotheses.sort_values(["request_id", "row", "layer"], ignore_index=True)
    is_change = (table.row != table.row.shift()) | (table.token_id != table.token_id.shift())
    changes = table[is_change].groupby("row", sort=False).token
    ends = table[~table.row.duplicated(keep="last")].rename(columns={"token": "final_token"})
    ends = ends.assign(
        prediction_depth=prediction_depths(table),
        num_flips=changes.size().to_numpy() - 1,
        path=changes.agg(" → ".join).to_numpy(),
    )
    return typed(ends.reset_index(drop=True), "prediction_depth")


def with_groups(depths: pd.DataFrame) -> pd.DataFrame:
    """Returns the lines of `prediction_depth_of` with a column group: the verdict on the draft token and the kind of
    pass, such as "draft rejected, verify pass", or "nothing drafted".

    A drafter may stop at an early layer, which limits the depth, so rows of draft passes have groups of their own. Left
    out are draft tokens without a verdict, and rows that were fed a draft token that was never committed.
    """
    is_known = ~depths.status.isin(DISCARDED_DRAFT) & (depths.verdict != "never_judged").fillna(True)
    known = depths[is_known]
    groups = [
        "nothing drafted" if pd.isna(verdict) else f"draft {verdict}, {'draft' if phase == 'decode' else 'verify'} pass"
        for verdict, phase in zip(known.verdict, known.phase, strict=True)
    ]
    return known.assign(group=pd.Series(groups, index=known.index, dtype=object))


def prediction_depth_by_verdict(depths: pd.DataFrame) -> pd.DataFrame:
    """Returns a DataFrame with one line for each group of `with_groups` (index): rows, prediction depth, changes of
    first choice.

    Columns: rows (their number), prediction_depth_median, prediction_depth_mean, flips_mean. depths: as from
    `prediction_depth_of`.
    """
    return (
        with_groups(depths)
        .groupby("group")
        .agg(
            rows=("row", "size"),
            prediction_depth_median=("prediction_depth", "median"),
            prediction_depth_mean=("prediction_depth", "mean"),
            flips_mean=("num_flips", "mean"),
        )
    )
