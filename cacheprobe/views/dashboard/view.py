"""Defines what a view of the page is, checks the values in the page's questions, and turns errors into answers."""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from html import unescape
from typing import TYPE_CHECKING, NoReturn, TypeVar

import pandas as pd
from dash import dcc, html
from pyarrow import ArrowException

from cacheprobe.core.values import JsonDict
from cacheprobe.views.style import FIGURE_CONFIG, Figure, layout_template
from cacheprobe.views.text import markup

if TYPE_CHECKING:
    from cacheprobe.views.dashboard.run_list import RunList
    from cacheprobe.views.dashboard.run_tables import RunTables

PageQuestion = JsonDict
"""A question of the page for one view, as JSON, such as {"run": 0, "step": 7}. The functions below check its
values."""
PageAnswer = JsonDict
"""html: HTML with every text of a run escaped.  graphs: components from `graphs`.  more: HTML below the graphs.
error: the reason if the view cannot be shown.
"""

T = TypeVar("T", bound=str)

_EXPECTED = (ValueError, KeyError, OSError, ArrowException)
_PANEL, _BARS = 210, 46
"""Least width in pixels of a panel beside others, and of a group of bars with its name."""
_log = logging.getLogger(__name__)


class CannotShow(ValueError):
    """Raised if a view cannot be shown, for example because the run lacks the data. The message is shown on the
    page."""


class View(ABC):
    """Shows one thing for one question of the page: as HTML, as a table, and as code. The methods raise CannotShow for
    a wrong question, or if the run lacks the data."""

    def __init__(self, run_list: "RunList", question: PageQuestion) -> None:
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
    def tables(self) -> "RunTables":
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


def answered(view: Callable[[PageQuestion], str | PageAnswer], question: PageQuestion) -> PageAnswer:
    """Calls a view with the page's question, and returns the view's result as a dict for the page. An error becomes a
    dict with html and error, so that an error in one view does not affect the others."""
    try:
        result = view(_Question(question))
    except _EXPECTED as error:
        message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    except Exception as error:
        _log.exception("no answer to %r", question)
        message = f"this cannot be shown: {type(error).__name__}: {error}"
    else:
        return {"html": result} if isinstance(result, str) else result
    return {"html": f'<p class="refused">{markup(message)}</p>', "error": message}


class _Question(JsonDict):
    """Holds a question, and says which of its values is missing."""

    def __missing__(self, name: str) -> NoReturn:
        raise CannotShow(f"the question has no {name}")


def whole(value: object, what: str, count: int) -> int:
    """Returns `value` if it is a whole number from 0 to count - 1. what: the name of the value in the error.
    Raises: CannotShow for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise CannotShow(f"there is no {what} {value!r:.40}; there are {count}, counted from 0")
    return value


def span(value: object, what: str, most: int) -> range:
    """Returns range(first, end), `end` excluded, if the value is a list [first, end] of two whole numbers and the range
    has 1 to `most` numbers. what: the name of the value in the error. Raises: CannotShow for anything else."""
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not 0 < (end := number(value[1], what)) - (first := number(value[0], what)) <= most
    ):
        raise CannotShow(f"{what} is [first, end], at most {most} apart, got {value!r:.60}")
    return range(first, end)


def requests_of(question: PageQuestion, by_losses: Sequence[int], most: int) -> list[int]:
    """Returns the ids of the requests on a page: places [first, end] of all requests, in order of their ids, or of
    `by_losses` if the question's order is "losses". Raises: CannotShow if there are none."""
    places = span(question["requests"], "requests", most)
    order = by_losses if question.get("order") == "losses" else range(len(by_losses))
    requests = list(order)[max(places.start, 0) : max(places.stop, 0)]
    if not requests:
        raise CannotShow(f"there is no request at {question['requests']} in this run")
    return requests


def number(value: object, what: str) -> int:
    """Returns the value if it is a whole number of at most 9 digits. what: the name of the value in the error. Raises:
    CannotShow for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 10**9:
        raise CannotShow(f"{what} is a whole number of at most 9 digits, got {value!r:.40}")
    return value


def one_of(value: object, what: str, known: tuple[T, ...]) -> T:
    """Returns the value if it is one of `known`. what: the name of the value in the error. Raises: CannotShow for
    anything else."""
    if value not in known:
        raise CannotShow(f"{what} is {' or '.join(known)}, got {value!r:.40}")
    return known[known.index(value)]


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
