"""Draws two figures by layer: when the most likely token is final, and how often a rejected draft token leads the
committed one."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.views.intervals import error_bars, interval_texts
from cacheprobe.views.style import Figure, layer_ticks, layout_template
from cacheprobe.views.text import markup

_GREY = "#7b858f"
_COLORS = ("#7c5fbd", "#2b8cbe", "#c2702b", "#2f9e4f")
_TIME = dict(template=layout_template(), height=400, margin=dict(l=48, r=12, t=90, b=48))


def final_choice_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with a line for each of the first four kinds of row (column `kind`): by layer, the share
    of rows whose most likely token is already that of their last layer. A dotted line shows chance: the share that
    equals another row's last choice.

    table: kind, layer, share, low, high (95 %), chance.
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("the table of final choices is empty; read some rows")
    table = table.assign(kind=table.kind.map(markup))
    figure = Figure()
    halfway = []
    for kind, color in zip(dict.fromkeys(table.kind), _COLORS, strict=False):
        lines = table[table.kind == kind].sort_values("layer")
        figure.add_scatter(
            x=lines.layer.tolist(), y=lines.share.tolist(), name=kind, mode="lines+markers",
            line=dict(color=color, width=2),
            error_y=error_bars(lines, "share"), customdata=interval_texts(lines, "share", ".1%", rows="rows"),
            hovertemplate=f"{kind}, layer %{{x}}: %{{customdata}}<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=lines.layer.tolist(), y=lines.chance.tolist(), name=f"{kind}: another row's choice", mode="lines",
            line=dict(color=color, width=1, dash="dot"),
            hovertemplate=f"{kind}, another row's choice, layer %{{x}}: %{{y:.1%}}<extra></extra>",
        )  # fmt: skip
        at_least_half = lines[lines.share >= 0.5]
        if len(at_least_half):
            halfway.append(f"{kind} from layer {at_least_half.layer.iloc[0]}")
    title = (
        f"Half hold their final choice: {', '.join(halfway)}" if halfway else "No layer has half of the final choices"
    )
    figure.update_layout(title=title, **_TIME)
    figure.update_xaxes(title="layer", **layer_ticks(table.layer))
    figure.update_yaxes(title="share of rows", tickformat=".0%", range=[-0.02, 1.04])
    return figure


def disagreement_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with one panel for each drafter: by layer, the share of rejected draft tokens that are
    more likely than the token committed in their place. A dotted line shows the same share for rejected tokens of other
    rows.

    table: drafter, layer, share, low, high (95 %), control (the dotted line).
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("no draft was rejected, so there is nothing to draw")
    table = table.assign(drafter=table.drafter.map(markup))
    drafters = list(dict.fromkeys(table.drafter))
    figure = make_subplots(rows=1, cols=len(drafters), shared_yaxes=True, subplot_titles=drafters, figure=Figure())
    for column, drafter in enumerate(drafters, start=1):
        lines = table[table.drafter == drafter].sort_values("layer")
        figure.add_scatter(
            x=lines.layer.tolist(), y=lines.share.tolist(), name="the rejected token", showlegend=column == 1,
            mode="lines+markers", line=dict(color="#d9483b", width=2), marker=dict(symbol="x", size=6),
            row=1, col=column,
            error_y=error_bars(lines, "share"),
            customdata=interval_texts(lines, "share", ".1%", rejected="rejected drafts"),
            hovertemplate=f"{drafter}, layer %{{x}}: %{{customdata}}<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=lines.layer.tolist(), y=lines.control.tolist(), name="another row's rejected token",
            showlegend=column == 1, mode="lines", line=dict(color=_GREY, dash="dot", width=1.5), row=1, col=column,
            hovertemplate=f"{drafter}, another row's rejected token, layer %{{x}}: %{{y:.1%}}<extra></extra>",
        )  # fmt: skip
    ends = table.sort_values("layer").groupby("drafter", sort=False)
    held_until = [
        f"{name} until layer {int(lines[lines.share > 0.5].layer.max())}"
        for name, lines in ends
        if (lines.share > 0.5).any()
    ]
    title = (
        f"Most hold the rejected token likelier: {', '.join(held_until)}"
        if held_until
        else "The committed token leads throughout"
    )
    figure.update_layout(title=title, **_TIME)
    figure.update_xaxes(title="layer", **layer_ticks(table.layer))
    figure.update_yaxes(title="share of rejected drafts", tickformat=".0%", range=[-0.02, 1.04], col=1)
    return figure
