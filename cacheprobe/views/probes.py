"""Draws probes of hidden states: accuracy by layer and place with baselines, and how well states predict rollbacks."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.core.hook_names import site_label
from cacheprobe.views.intervals import error_bars, interval_texts
from cacheprobe.views.style import Figure, layer_ticks, layout_template
from cacheprobe.views.text import markup, shorten

_SITES = {"S": ("#7c5fbd", "circle"), "T": ("#2b8cbe", "diamond"), "C": ("#c2702b", "square")}
_PANEL_COLUMNS = 22
"""Largest width of the name above a panel, in columns of a monospaced font."""
_BASELINES = {"untrained": ("#7b858f", "dash"), "embedding": ("#7b858f", "dot"), "majority": ("#7b858f", "solid")}
_CONTROLS = {"position": ("position alone", "dash"), "margin": ("margin alone", "dot"),
             "shuffled": ("labels shuffled", "solid")}  # fmt: skip


def probe_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure of the probes' accuracy on held-out examples by layer: a panel for each place in the
    text, a line for each site (S, T, C), and 95 % intervals. Grey lines are baselines, such as the most common class.

    table: from `cp.probes.ProbeResult`. The baselines are the untrained model (of the first site), the word
    embeddings, and the most common class.
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("the table of probes is empty; fit some")
    places = list(dict.fromkeys(zip(table["at"], table.place, strict=True)))
    titles = [_place_name(*place, most=_PANEL_COLUMNS) for place in places]
    figure = make_subplots(rows=1, cols=len(places), shared_yaxes=True, subplot_titles=titles, figure=Figure())
    for column, (at, place) in enumerate(places, start=1):
        of_place = table[(table["at"] == at) & (table.place == place)]
        for site in [site for site in _SITES if (of_place.site == site).any()]:
            (color, symbol), name = _SITES[site], site_label(site)
            lines = of_place[of_place.site == site].sort_values("layer")
            figure.add_scatter(
                x=lines.layer.tolist(), y=lines.accuracy.tolist(), name=name, legendgroup=site, showlegend=column == 1,
                mode="lines+markers", line=dict(color=color, width=2), marker=dict(symbol=symbol, size=6),
                error_y=error_bars(lines, "accuracy"),
                customdata=interval_texts(lines, "accuracy", ".3f", examples="examples", groups="groups"),
                hovertemplate=f"{site}, layer %{{x}}, {_place_name(at, place)}: %{{customdata}}<extra></extra>",
                row=1, col=column,
            )  # fmt: skip
        first = of_place[of_place.site == of_place.site.iloc[0]].sort_values("layer")
        for name, (color, dash) in _BASELINES.items():
            if first[name].notna().all():
                figure.add_scatter(
                    x=first.layer.tolist(), y=first[name].tolist(), name=name, legendgroup=name, mode="lines",
                    showlegend=column == 1, line=dict(color=color, dash=dash, width=1.5), row=1, col=column,
                    hovertemplate=f"{name}, layer %{{x}}, {_place_name(at, place)}: %{{y:.3f}}<extra></extra>",
                )  # fmt: skip
    above = table[table.is_above].groupby(["at", "place"]).ngroups
    title = f"At {above} of {len(places)} places some layer tells the state better than any baseline"
    figure.update_layout(template=layout_template(), title=title, height=420, margin=dict(l=48, r=12, t=110, b=48))
    figure.update_layout(legend_y=1.09)  # above the names of the panels
    figure.update_xaxes(title="layer", **layer_ticks(table.layer, 4))
    figure.update_yaxes(range=[0.2, 1.03])
    figure.update_yaxes(title="held-out accuracy", col=1)
    return figure


def _place_name(at: str, place: object, most: int = 200) -> str:
    """Returns the name of a probed place as escaped text, such as "operation 3" or "prompt's last token"."""
    if at == "event":
        return f"operation {place}"
    return "prompt's last token" if place == -1 else markup(shorten(f"{at} {place}", most))


def rollback_prediction_figure(table: pd.DataFrame, unit: str = "draft") -> go.Figure:
    """Returns a plotly figure of the AUROC by layer with which probes of hidden states predict a rollback: one panel
    for each drafter. Grey lines are controls: position alone, the top-two margin of the logits alone, and shuffled
    labels.

    table: from `cp.probes.RollbackPrediction`, of one or more drafters.  unit: lines to draw: "draft" (whole
    drafts) or "candidate" (each draft token up to the first mismatch).
    Raises: ValueError if the table has no line of this unit.
    """
    rows = table[table.unit == unit] if len(table) else table
    if rows.empty:
        raise ValueError(f"there is no line of unit {unit!r} to draw: too few rollbacks, or another unit was asked for")
    rows = rows.assign(drafter=rows.drafter.map(markup))
    drafters = list(dict.fromkeys(rows.drafter))
    figure = make_subplots(rows=1, cols=len(drafters), shared_yaxes=True, subplot_titles=drafters, figure=Figure())
    for column, drafter in enumerate(drafters, start=1):
        lines = rows[rows.drafter == drafter].sort_values("layer")
        figure.add_scatter(
            x=lines.layer.tolist(), y=lines.auroc.tolist(), name="states", showlegend=column == 1, mode="lines+markers",
            line=dict(color="#d9483b", width=2), marker=dict(symbol="x", size=7), row=1, col=column,
            error_y=error_bars(lines, "auroc"), customdata=interval_texts(lines, "auroc", ".3f"),
            hovertemplate=f"states before {drafter}'s {unit}, layer %{{x}}: %{{customdata}}<extra></extra>",
        )  # fmt: skip
        for name in _CONTROLS:
            figure.add_scatter(
                x=lines.layer.tolist(), y=lines[name].tolist(), name=_CONTROLS[name][0],
                showlegend=column == 1, mode="lines", line=dict(color="#7b858f", dash=_CONTROLS[name][1], width=1.5),
                row=1, col=column,
                hovertemplate=f"{_CONTROLS[name][0]}, {drafter}, layer %{{x}}: %{{y:.3f}}<extra></extra>",
            )  # fmt: skip
    last = rows.sort_values("layer").groupby("drafter", sort=False).tail(1)
    better = [line.drafter for line in last.itertuples() if line.gain_low > 0]
    drafter_names = ", ".join(better) or "no drafter here"
    title = f"States foretell a rollback better than position or margin for {drafter_names}"
    figure.update_layout(template=layout_template(), title=title, height=400, margin=dict(l=48, r=12, t=110, b=48))
    figure.update_xaxes(title="layer", **layer_ticks(rows.layer, 6))
    figure.update_yaxes(range=[0.35, 1.02])
    figure.update_yaxes(title=f"AUROC, by {unit}", col=1)
    return figure
