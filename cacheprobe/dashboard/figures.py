"""Figures as components of the page; plotly itself is loaded by the browser with the first of them."""

import json
from html import unescape
from typing import Any

from dash import dcc, html

from cacheprobe.plots.style import FIGURE_CONFIG, layout_template

_PANEL, _BARS = 210, 46
"""Pixels of a panel beside others, and of a group of bars with its name: a narrower page scrolls the figure."""


def graphs(name: str, figures: list[Any], *, dark: bool) -> list[dict[str, Any]]:
    """One below the other, each as high as it is laid out, as JSON. Titles are the page's: the first is left to whoever
    asked, the others stand as headings."""
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


def narrowest(figure: Any) -> int:
    """Pixels that a figure needs for what stands side by side in it; 0 where any width will do."""
    starts = {axis.domain[0] for axis in figure.select_xaxes() if axis.domain}
    groups = max((len(set(bars.x)) for bars in figure.select_traces({"type": "bar"}) if _named(bars.x)), default=0)
    return max(_PANEL * len(starts) if len(starts) > 1 else 0, _BARS * groups)


def _named(places: Any) -> bool:
    return places is not None and len(places) > 0 and isinstance(places[0], str)
