"""Draws how far the answer to a coin-flip question moves if slots of its cache are swapped, masked or made noisy."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import STATUS_STYLES, Figure, layout_template
from cacheprobe.views.text import markup

_GREY = "#7b858f"
_TREATMENTS = {  # colour, texture
    "swapped": (STATUS_STYLES["committed"]["color"], ""),
    "masked": (STATUS_STYLES["superseded"]["color"], "/"),
    "other names": (_GREY, "x"),
    "noise": (STATUS_STYLES["rolled_back"]["color"], "."),
    "own again": ("#2b6cb0", "-"),
}


def coin_rows_figure(effects: pd.DataFrame, *, unit: str = "span", people: int | None = None) -> go.Figure:
    """Returns a plotly bar figure of the mean normalised logit difference, for each changed part of the cache and each
    treatment: swapped with the other question, masked, noise, and two controls. 0 is the model's unchanged answer, 1
    the model's answer with the other coin.

    effects: from `cacheprobe_analyses.coin.coin_rows`: people, unit, where, treatment, n, total, flips.
    unit: "span" (several cache slots) or "row" (one cache slot).
    people: only questions about this many people; None for all.
    Raises: ValueError if no line has this unit and number of people.
    """
    chosen = effects[effects.unit == unit]
    if people is not None:
        chosen = chosen[chosen.people == people]
    if chosen.empty:
        raise ValueError(
            f"no effects of unit {unit!r} and {people} people; the table has {', '.join(effects.unit.unique())} and "
            f"{', '.join(map(str, sorted(effects.people.unique())))} people"
        )
    summed = chosen.groupby(["where", "treatment"], sort=False)[["n", "total", "flips"]].sum().reset_index()
    summed["nld"] = summed.total / summed.n
    figure = Figure()
    for name, (colour, texture) in _TREATMENTS.items():
        lines = summed[summed.treatment == name]
        figure.add_bar(
            x=[markup(where) for where in lines["where"]],
            y=lines.nld.tolist(),
            name=name,
            marker=dict(color=colour, pattern=dict(shape=texture)),
            customdata=[[int(row.flips), int(row.n)] for row in lines.itertuples()],
            hovertemplate=f"%{{x}}, {name}: %{{y:.3f}}<br>%{{customdata[0]}} of %{{customdata[1]}} flip<extra></extra>",
        )
    figure.update_layout(
        template=layout_template(), title=_finding(summed, unit), barmode="group", height=380, dragmode=False,
        margin=dict(l=48, r=12, t=72, b=72),
    )  # fmt: skip
    figure.update_yaxes(title="0 as it was, 1 as the other question")
    return figure


def _finding(summed: pd.DataFrame, unit: str) -> str:
    swapped = summed[(summed.treatment == "swapped") & (summed["where"] != "all rows")]
    best = swapped.loc[swapped.nld.idxmax()]
    noun = "slot" if unit == "row" else unit
    return f"The {noun} whose swap brings over most: {markup(best['where'])}, {best.nld:.2f}"
