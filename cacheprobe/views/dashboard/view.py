"""Defines what a view of the page is; turns its figures into components of the page, its table into CSV, and names the
lines of Python that open its run."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from html import unescape
from io import BytesIO
from pathlib import Path

import pandas as pd
from dash import dcc, html

from cacheprobe.core.export import write_csv
from cacheprobe.core.values import JsonDict
from cacheprobe.views.dashboard.questions import PageAnswer, PageQuestion, number, whole
from cacheprobe.views.dashboard.reader import RECORDED
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.style import FIGURE_CONFIG, Figure, layout_template
from cacheprobe.views.text import markup

_PANEL, _BARS = 210, 46
"""Least width in pixels of a panel beside others, and of a group of bars with its name."""


def button(label: str, is_chosen: bool = False, /, **data: object) -> str:
    """Returns HTML of a button. label: plain text.  data: values of its data-attributes, by name."""
    about = "".join(f' data-{name}="{markup(str(value))}"' for name, value in data.items())
    return f'<button class="plain{" chosen" * is_chosen}"{about}>{markup(label)}</button>'


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

    notebook: Sequence[str] = ()
    """Lines of Python that follow those which open the run, with attributes of the view in braces: {self.request}."""

    def code(self) -> Sequence[str]:
        """Returns lines of Python for a notebook. They name that table `table`, and the last of them makes the picture,
        if the view has one."""
        return [*opened(self.tables), *(line.format(self=self) for line in self.notebook)]

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
        """Returns Dash components in JSON: the figures one below the other, each at its own height, in the page's
        colours. Changes the figures: their titles are removed, and the light or dark template is set.

        The caller shows the first figure's title; the other titles become headings. name: start of the components' ids.
        """
        components = []
        template = layout_template(dark=self.question.get("theme") == "dark")
        for i, figure in enumerate(figures):
            title = figure.layout.title.text
            if i and title:
                components.append(html.H3(unescape(title).replace("<br>", " ")).to_plotly_json())
            height = (figure.layout.height or 450) - 40  # without its title the figure needs 40 px less
            figure.update_layout(template=template, height=None, autosize=True, title=None, margin_t=44)
            config = {**FIGURE_CONFIG, "displayModeBar": False}
            about = {"id": f"{name}-{i}", "config": config, "responsive": True, "style": {"height": "100%"}}
            graph = dcc.Graph(figure=json.loads(figure.to_json()), **about)
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


WAYS = {
    "link": ("copy link", "copy the address of what is shown"),
    "svg": ("SVG", "save this view as a vector graphic"),
    "png": ("PNG", "save this view as an image"),
    "csv": ("CSV", "save the table of this view"),
    "code": ("code", "show the Python code that makes this view in a notebook"),
}
"""By way to export a view: the button's name and hover text. assets/exports.js makes the buttons."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First letters of a cell that a spreadsheet would compute."""


def csv_text(table: pd.DataFrame) -> str:
    """Returns a table as CSV, as `write_csv` writes it: a head, and one line for each line of the table. A text that
    begins like a formula gets an apostrophe before it, so that a spreadsheet shows it as text."""
    file = BytesIO()
    write_csv(table.map(_cell).rename(columns=_cell), file)
    return file.getvalue().decode()


def _cell(value: object) -> object:
    """Returns a value for a cell of a CSV file: a text that begins like a formula gets an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def opened(tables: RunTables, name: str = "trace") -> list[str]:
    """Returns the lines of Python that open a run without its model. name: of the variable."""
    return ["import cacheprobe as cp", "", f"{name} = cp.load_trace({directory_of(tables)!r})"]


def opened_with_model(run_list: RunList, tables: RunTables) -> list[str]:
    """Returns the lines of Python that open a run with its model."""
    fingerprint = tables.run.fingerprint
    adapter = f", adapter={fingerprint['adapter']!r}" if fingerprint.get("adapter") else ""
    name, dtype, device = run_list.model or fingerprint["model"], fingerprint["dtype"], fingerprint["device"]
    return [
        "import cacheprobe as cp",
        "",
        f"model = cp.load_model({name!r}, dtype={dtype!r}, device={device!r}{adapter})",
        f"trace = cp.load_trace({directory_of(tables)!r}, model)",
    ]


def readings_code(
    run_list: RunList, tables: RunTables, lens: object, site: str, request: int, chosen: str
) -> list[str]:
    """Returns the lines of Python that open a run and name some of its lens readings `table`; the recorded ones of all
    requests are named `readings`. lens: of the page's menu.  chosen: condition on the request's rows, such as
    "row == 5"."""
    if lens == RECORDED:
        return [
            *opened(tables),
            "readings = cp.analysis.lens_readings(trace, include_rolled_back=True)",
            f"table = readings.query({f'request_id == {request} and {chosen}'!r})",
        ]
    kind, _, number = str(lens).partition(":")
    reads = "cp.lenses.LogitLens()"
    if kind == "tuned":
        reads = f"cp.lenses.TunedLens.load({str(run_list.lenses[int(number)].absolute())!r}, model)"
    return [
        *opened_with_model(run_list, tables),
        f"rows = trace.rows({request}).query({f'{chosen} and state_index >= 0'!r})",
        f"table = readings = cp.analysis.read_states(trace, {reads}, {site!r}, rows=rows)",
    ]


def directory_of(tables: RunTables) -> str:
    """Returns the absolute path of a run's directory as text."""
    return str(Path(tables.run.directory).absolute())
