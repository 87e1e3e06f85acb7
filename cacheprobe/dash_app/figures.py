"""Figures as components of the page; plotly itself is loaded by the browser with the first of them."""

import json
from typing import Any

from dash import dcc, html

from cacheprobe.views.style import FIGURE_CONFIG, layout_template


def graphs(name: str, figures: list[Any], *, dark: bool) -> list[dict[str, Any]]:
    """One below the other, each as high as it is laid out, as JSON. The first loses its title, which the page shows."""
    drawn = []
    for i, figure in enumerate(figures):
        height = (figure.layout.height or 450) - (40 if i == 0 else 0)
        figure.update_layout(template=layout_template(dark=dark), height=None, autosize=True)
        if i == 0:
            figure.update_layout(title=None, margin_t=44)
        place = dcc.Graph(
            id=f"{name}-{i}",
            figure=json.loads(figure.to_json()),
            config={**FIGURE_CONFIG, "displayModeBar": False},
            responsive=True,
            style={"height": "100%"},
        )
        drawn.append(html.Div(place.to_plotly_json(), style={"height": f"{height}px"}).to_plotly_json())
    return drawn
