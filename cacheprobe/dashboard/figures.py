"""Turns figures into components of the page; the browser loads plotly with the first of them."""

import json
from collections.abc import Sequence
from html import unescape

import numpy as np
from dash import dcc, html

from cacheprobe.core.values import JsonDict
from cacheprobe.plots.style import FIGURE_CONFIG, Figure, layout_template

_PANEL, _BARS = 210, 46
"""Pixels of a panel beside others, and of a group of bars with its name; a narrower page scrolls the figure."""


def graphs(name: str, figures: Sequence[Figure], *, dark: bool) -> list[JsonDict]:
    """Returns the figures as components in JSON, one below the other, each at its own height.

    The caller shows the first figure's title; the other titles become headings.
    """
    drawn = []
    for i, figure in enumerate(figures):
        title = figure.layout.title.text
        if i and title:
            drawn.append(html.H3(unescape(title).replace("<br>", " ")).to_plotly_json())
        height = (figure.layout.height or 450) - 40
        figure.update_layout(template=layout_template(dark=dark), height=None, autosize=True, title=None, margin_t=44)
        place = dcc.Graph(
            id=f"{name}-{i}",
            figure=json.loads(figure.to_json()),
            config={**FIGURE_CONFIG, "displayModeBar": False},
            responsive=True,
            style={"height": "100%"},
        )
        style = {"height": f"{height}px", "minWidth": f"{narrowest(figure)}px"}
        drawn.append(html.Div(place.to_plotly_json(), style=style).to_plotly_json())
    return drawn


def narrowest(figure: Figure) -> int:
    """Returns the least width in pixels for the figure's panels and groups of bars; 0 if any width will do."""
    starts = {axis.domain[0] for axis in figure.select_xaxes() if axis.domain}
    groups = max((len(set(bars.x)) for bars in figure.select_traces({"type": "bar"}) if _named(bars.x)), default=0)
    return max(_PANEL * len(starts) if len(starts) > 1 else 0, _BARS * groups)


def _named(places: Sequence[object] | np.ndarray | None) -> bool:
    return places is not None and len(places) > 0 and isinstance(places[0], str)
