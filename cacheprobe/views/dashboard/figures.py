"""Turns plotly figures into components of the page, as JSON; the browser loads plotly with the first figure."""

import json
from collections.abc import Sequence
from html import unescape

import numpy as np
from dash import dcc, html

from cacheprobe.core.values import JsonDict
from cacheprobe.views.style import FIGURE_CONFIG, Figure, layout_template

_PANEL, _BARS = 210, 46
"""Least width in pixels of a panel beside others, and of a group of bars with its name."""


def graphs(name: str, figures: Sequence[Figure], *, dark: bool) -> list[JsonDict]:
    """Returns a list of Dash components in JSON: the figures one below the other, each at its own height. Changes the
    figures: their titles are removed, and the light or dark template is set.

    The caller shows the first figure's title; the other titles become headings. name: start of the components' ids.
    """
    components = []
    for i, figure in enumerate(figures):
        title = figure.layout.title.text
        if i and title:
            components.append(html.H3(unescape(title).replace("<br>", " ")).to_plotly_json())
        height = (figure.layout.height or 450) - 40  # without its title the figure needs 40 px less
        figure.update_layout(template=layout_template(dark=dark), height=None, autosize=True, title=None, margin_t=44)
        graph = dcc.Graph(
            id=f"{name}-{i}",
            figure=json.loads(figure.to_json()),
            config={**FIGURE_CONFIG, "displayModeBar": False},
            responsive=True,
            style={"height": "100%"},
        )
        style = {"height": f"{height}px", "minWidth": f"{narrowest(figure)}px"}
        components.append(html.Div(graph.to_plotly_json(), style=style).to_plotly_json())
    return components


def narrowest(figure: Figure) -> int:
    """Returns the least width in pixels that the figure's panels, or its groups of bars, need; 0 if any width will
    do."""
    starts = {axis.domain[0] for axis in figure.select_xaxes() if axis.domain}
    groups = max((len(set(bars.x)) for bars in figure.select_traces({"type": "bar"}) if _are_names(bars.x)), default=0)
    return max(_PANEL * len(starts) if len(starts) > 1 else 0, _BARS * groups)


def _are_names(x: Sequence[object] | np.ndarray | None) -> bool:
    return x is not None and len(x) > 0 and isinstance(x[0], str)
