"""Draws beliefs about three hidden states as points of a triangle: exact, and as a regression reads them."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.views.style import Figure, layout_template


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
    figure.update_layout(template=layout_template(), title=title, height=400, margin=dict(l=24, r=12, t=90, b=24))
    figure.update_xaxes(range=[-0.1, 1.1], showticklabels=False)
    figure.update_yaxes(range=[-0.1, 1.0], showticklabels=False)
    return figure
