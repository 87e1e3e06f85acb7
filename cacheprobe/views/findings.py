"""Draws tables of the repository's analyses: patched states and cache slots, forced states, perplexity, beliefs."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.views.style import Figure, layer_ticks, set_layout

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
    set_layout(figure, f"{title}{means['wrong']:.3f}", 400)
    figure.update_xaxes(title="forced hidden state", dtick=1)
    figure.update_yaxes(title="KL to its emissions, nats")
    return figure


_LENSES = {"logit": ("#7b858f", "dash"), "tuned": ("#7c5fbd", "solid")}


def perplexity_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with a line for each lens: the perplexity, on a logarithmic axis, that its readings give
    to the text's own next tokens, by layer.

    table: lines with lens (logit, tuned), layer and perplexity.
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("there is nothing to draw; read some layers")
    figure, said = Figure(), []
    for lens, (color, dash) in _LENSES.items():
        own = table[table.lens == lens].sort_values("layer")
        said.append(f"{int((own.perplexity.diff() > 0).sum())} ({lens} lens)")
        figure.add_scatter(
            x=own.layer.tolist(), y=own.perplexity.tolist(), name=f"{lens} lens", mode="lines+markers",
            line=dict(color=color, dash=dash, width=2),
            hovertemplate=f"{lens} lens, layer %{{x}}: perplexity %{{y:,.1f}}<extra></extra>",
        )  # fmt: skip
    set_layout(figure, f"Layers at which perplexity rises: {', '.join(said)}", 400)
    figure.update_xaxes(title="layer", **layer_ticks(table.layer))
    figure.update_yaxes(title="perplexity", type="log")
    return figure


def simplex_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with a triangle of points for each panel, such as exact, trained and untrained.

    table: lines with panel, the exact belief a, b, c, which is the point's colour (red, green, blue), and the belief
    x, y, z at which it is drawn. A corner is certainty of one state.
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("there is nothing to draw; give some beliefs")
    panels = list(dict.fromkeys(table.panel))
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=panels, figure=Figure())
    for column, panel in enumerate(panels, start=1):
        own = table[table.panel == panel]
        colors = [
            f"rgb({255 * a:.0f},{255 * b:.0f},{255 * c:.0f})" for a, b, c in zip(own.a, own.b, own.c, strict=True)
        ]
        figure.add_scattergl(
            x=(own.y + own.z / 2).to_numpy("float32"), y=(own.z * 3**0.5 / 2).to_numpy("float32"), mode="markers",
            showlegend=False, marker=dict(size=3, color=colors), row=1, col=column,
            customdata=own[["a", "b", "c", "x", "y", "z"]].to_numpy("float32"),  # half the bytes of a stored figure
            hovertemplate=f"{panel}: belief "
            + ", ".join(f"%{{customdata[{i}]:.2f}}" for i in range(3)) + "<br>at position "
            + ", ".join(f"%{{customdata[{i}]:.2f}}" for i in range(3, 6)) + "<extra></extra>",
        )  # fmt: skip
        figure.update_yaxes(scaleanchor=f"x{column if column > 1 else ''}", row=1, col=column)
    apart = (((table[["a", "b", "c"]].to_numpy() - table[["x", "y", "z"]].to_numpy()) ** 2).sum(1)) ** 0.5
    said = [f"{apart[(table.panel == panel).to_numpy()].mean():.3f} ({panel})" for panel in panels]
    title = f"Mean distance of a point from the exact belief: {', '.join(said)}"
    set_layout(figure, title, 400, top=90, bottom=24, left=24)
    figure.update_xaxes(range=[-0.1, 1.1], showticklabels=False)
    figure.update_yaxes(range=[-0.1, 1.0], showticklabels=False)
    return figure
