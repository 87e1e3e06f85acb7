"""Draws how near a prediction comes to a hidden state's emissions when that state is forced."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import Figure, layout_template

_PATCHES = {"unpatched": "#7b858f", "recovered": "#2f9e4f", "wrong": "#d9483b"}


def forcing_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with three bars for each hidden state: the KL divergence, in nats, from its emissions to
    the prediction, without a patch, with the state's recovered centroid, and with that of another state.

    table: lines with state, patch (unpatched, recovered, wrong) and kl.
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("there is nothing to draw; force some states")
    figure = Figure()
    for patch, color in _PATCHES.items():
        own = table[table.patch == patch].sort_values("state")
        figure.add_bar(
            x=own.state.tolist(), y=own.kl.tolist(), name=patch, marker_color=color,
            hovertemplate=f"{patch}, hidden state %{{x}}: %{{y:.3f}} nats<extra></extra>",
        )  # fmt: skip
    means = table.groupby("patch").kl.mean()
    title = f"Forcing a state: {means['unpatched']:.3f} nats become {means['recovered']:.3f}, with another state's "
    figure.update_layout(template=layout_template(), title=f"{title}{means['wrong']:.3f}", height=400)
    figure.update_xaxes(title="forced hidden state", dtick=1)
    figure.update_yaxes(title="KL to its emissions, nats")
    return figure
