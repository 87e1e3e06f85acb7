"""Defines what a view of the page is, and turns plotly figures into components of the page."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from html import unescape

import pandas as pd
from dash import dcc, html

from cacheprobe.core.values import JsonDict
from cacheprobe.views.dashboard.questions import PageAnswer, PageQuestion, number, whole
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.style import FIGURE_CONFIG, Figure, layout_template

_PANEL, _BARS = 210, 46
"""Least width in pixels of a panel beside others, and of a group of bars with its name."""


class View(ABC):
    """Shows one thing for one question of the page: as HTML, as a table, and as code. The methods raise CannotShow for
    a wrong question, or if the run lacks the data."""

    def __init__(self, run_list: RunList, question: PageQuestion) -> None:
        self.run_list = run_list
        self.question = question

    @abstractmethod
    def draw(self) -> str | PageAnswer:
        """Returns HTML, or HTML and figures as a dict for the page."""

    @abstractmethod
    def table(self) -> pd.DataFrame:
        """Returns the table that the view shows, for CSV."""

    @abstractmethod
    def code(self) -> Sequence[str]:
        """Returns lines of Python for a notebook. They name that table `table`, and the last of them makes the picture,
        if the view has one."""

    @cached_property
    def tables(self) -> RunTables:
        """Tables of the run that the question names."""
        return self.run_list.tables(self.question["run"])

    @cached_property
    def request(self) -> int:
        """Id of the request that the question names."""
        return whole(self.question["request"], "request", len(self.tables.run.requests))

    @cached_property
    def step(self) -> int:
        """Step that the question names."""
        return number(self.question["step"], "step")

    @cached_property
    def position(self) -> int:
        """Position that the question names."""
        return number(self.question["position"], "position")

    def graphs(self, name: str, figures: Sequence[Figure]) -> list[JsonDict]:
        """Returns the figures as components of the page, in its colours. name: as in `graphs`."""
        return graphs(name, figures, dark=self.question.get("theme") == "dark")


def graphs(name: str, figures: Sequence[Figure], *, dark: bool) -> list[JsonDict]:
    """Returns a list of Dash components in JSON: the figures one below the other, each at its own height. Changes the
    figures: their titles are removed, and the light or dark template is set. The browser loads plotly with the first.

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
        style = {"height": f"{height}px", "minWidth": f"{_least_width(figure)}px"}
        components.append(html.Div(graph.to_plotly_json(), style=style).to_plotly_json())
    return components


def _least_width(figure: Figure) -> int:
    """Returns the least width in pixels that the figure's panels, or its groups of bars, need; 0 if any width will
    do."""
    starts = {axis.domain[0] for axis in figure.select_xaxes() if axis.domain}
    names = [set(bars.x) for bars in figure.select_traces({"type": "bar"}) if bars.x is not None and len(bars.x)]
    groups = max((len(group) for group in names if all(isinstance(name, str) for name in group)), default=0)
    return max(_PANEL * len(starts) if len(starts) > 1 else 0, _BARS * groups)
