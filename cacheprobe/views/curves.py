"""Whole-run figures: agreement with the committed token by layer, and where predictions settle."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import STATUS_STYLES, Figure, layer_ticks, layout_template
from cacheprobe.views.text import markup, shorten

_WORDS = {"committed": "committed", "candidate": "candidate", "rolled_back": "rolled back"}
_MOST_POINTS = 600
"""Rows drawn one by one; of more, only the outliers are."""
_NARROW = dict(l=48, r=12, t=56, b=48)


def agreement_figure(agreement: pd.DataFrame) -> go.Figure:
    """Share of first choices that are the committed token, by layer, one line for each status.

    agreement: as in `Trace.agreement`, layers down, statuses across. A line ends where no row of its status was read: a
    drafter may stop early.
    """
    if agreement.empty:
        raise ValueError("the agreement table is empty; a run that reads Z fills it")
    figure = Figure()
    for status in [s for s in _WORDS if s in agreement.columns]:
        style, share = STATUS_STYLES[status], agreement[status].dropna()
        figure.add_scatter(
            x=share.index.tolist(),
            y=share.tolist(),
            mode="lines+markers",
            name=_WORDS[status],
            line=dict(color=style["color"], dash=style["dash"], width=2),
            marker=dict(symbol=style["symbol"], size=7),
            hovertemplate=f"{_WORDS[status]} rows, layer %{{x}}: %{{y:.1%}}<extra></extra>",
        )
    figure.update_layout(
        template=layout_template(), title=_agreement_finding(agreement), height=360, margin=_NARROW, dragmode=False
    )
    figure.update_xaxes(title="layer", **layer_ticks(agreement.index))
    figure.update_yaxes(title="share of rows", tickformat=".0%", range=[-0.02, 1.04])
    return figure


def _agreement_finding(agreement: pd.DataFrame) -> str:
    status = "committed" if "committed" in agreement.columns else agreement.columns[0]
    share = agreement[status].dropna()
    below = share.index[share < 0.5]
    after = share.index if below.empty else share.index[share.index > below.max()]
    if after.empty:
        return f"No layer has the committed token first in half of the {_WORDS[status]} rows"
    return f"From layer {after[0]} on, at least half of the {_WORDS[status]} rows have the committed token first"


def settling_figure(settling: pd.DataFrame) -> go.Figure:
    """The layer from which a row's first choice stays what it is, by status and pass.

    settling: as in `Trace.settling`. Rows of a draft pass stand apart, since a drafter may stop at an early layer and
    then nothing can settle above it.
    """
    if settling.empty:
        raise ValueError("the settling table is empty; a run that reads Z fills it")
    drafted = (settling.status == "rolled_back") & (settling.phase == "decode")
    group = settling.status.map(_WORDS).where(settling.status != "rolled_back", "rolled back, verify pass")
    group = group.where(~drafted, "rolled back, draft pass").where(
        settling.status != "candidate", "candidate, draft pass"
    )
    figure = Figure()
    points = "all" if len(settling) <= _MOST_POINTS else "outliers"
    order = ["rolled back, draft pass", "candidate, draft pass", "rolled back, verify pass", "committed"]
    for name in [name for name in order if (group == name).any()]:  # the last is drawn on top
        rows = settling[group == name]
        style = STATUS_STYLES[rows.status.iloc[0]]
        figure.add_box(
            x=rows.settling_layer.tolist(),
            name=f"{name.replace(', ', ',<br>')}<br>({len(rows)} rows)",
            orientation="h",
            boxpoints=points,
            jitter=0.7,
            pointpos=0,
            marker=dict(color=style["color"], symbol=style["symbol"], size=4, opacity=0.55),
            line=dict(color=style["color"], width=2),
            fillcolor="rgba(128,128,128,0.12)",
            hovertext=[_hover(row) for row in rows.itertuples()],
            hoverinfo="text",
            hoveron="points",
            showlegend=False,
        )
    height = 100 + 74 * len(figure.data)
    figure.update_layout(
        template=layout_template(), title=_settling_finding(settling), height=height, margin=_NARROW, dragmode=False
    )
    figure.update_xaxes(title="settling layer", **layer_ticks(settling.settling_layer))
    return figure


def _settling_finding(settling: pd.DataFrame) -> str:
    said = []
    for status, phases in (("committed", None), ("rolled_back", "verify")):
        rows = settling[(settling.status == status) & (True if phases is None else settling.phase == phases)]
        if not rows.empty:
            said.append(f"{_WORDS[status]} rows at layer {rows.settling_layer.median():g}")
    return f"Predictions settle (median): {', '.join(said)}" if said else "Where predictions settle"


def _hover(row: Any) -> str:
    return (
        f"request {row.request_id} · step {row.step} · {row.phase} · {row.status} · position {row.position}<br>"
        f"settles at layer {row.settling_layer} after {row.num_flips} changes<br>{markup(shorten(row.path, 160))}"
    )
