"""Measures over the hypotheses table: pure functions from tidy table to tidy table."""

import pandas as pd

_ROW = ["request_id", "row", "step", "phase", "status", "position"]


def agreement_by_layer(hypotheses: pd.DataFrame) -> pd.DataFrame:
    """How often each layer's first choice is the committed token, by layer (rows) and status (columns).

    Rows without a committed successor do not count. Source: "accuracy of the hidden predictions" of the logit lens.
    """
    known = hypotheses[hypotheses.agrees.notna()]
    if known.empty:
        raise ValueError("no hypothesis has a committed token to agree with; capture must include Z")
    return known.assign(agrees=known.agrees.astype(float)).groupby(["layer", "status"]).agrees.mean().unstack()


def settling(hypotheses: pd.DataFrame) -> pd.DataFrame:
    """When each row's prediction settles, and what it was on the way: one line for every row of the trace.

    settling_layer: first layer from which the first choice stays that of the last layer read (prediction depth).
    num_flips: changes of first choice between adjacent layers.  path: the distinct first choices in order, as text.
    final_token: the last layer's first choice.  agrees: whether that is the committed token; null where none was.
    Source: prediction depth, Baldock et al. 2021 (arXiv 2106.09647), with layers for their k-NN probes.
    """
    if hypotheses.empty:
        raise ValueError("there are no hypotheses; capture must include Z")
    table = hypotheses.sort_values([*_ROW, "layer"])
    group = table.groupby("row", sort=False)
    previous = group.token_id.shift()
    flips = (table.token_id != previous) & previous.notna()
    final = group.token_id.transform("last")
    differs = table.layer.where(table.token_id != final)
    first = group.layer.transform("first")
    last_difference = differs.groupby(table.row).transform("max")
    # the layer after the last one that still said something else; the first layer read where none did
    following = table.layer.where(table.layer > last_difference).groupby(table.row).transform("min")
    settled = following.where(last_difference.notna(), first).astype(int)
    keep = flips | previous.isna()
    paths = (
        table.token.where(keep)
        .groupby(table.row)
        .agg(lambda tokens: " → ".join(t.strip() or repr(t) for t in tokens.dropna()))
    )
    ends = (
        table.assign(settling_layer=settled, num_flips=flips.groupby(table.row).transform("sum")).groupby("row").tail(1)
    )
    ends = ends.assign(path=ends.row.map(paths)).rename(columns={"token": "final_token"})
    columns = [*_ROW, "settling_layer", "num_flips", "path", "final_token", "committed_token", "agrees"]
    return ends[columns].reset_index(drop=True)


def settling_by_status(hypotheses: pd.DataFrame) -> pd.DataFrame:
    """Rows, settling layer (median, mean) and flips (mean) by status."""
    table = settling(hypotheses)
    return table.groupby("status").agg(
        rows=("row", "size"),
        settling_layer_median=("settling_layer", "median"),
        settling_layer_mean=("settling_layer", "mean"),
        flips_mean=("num_flips", "mean"),
    )
