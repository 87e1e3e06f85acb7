"""Builds the page: header, transport, tabs, and an empty place for every view, which assets/ fills."""

import json
from collections.abc import Sequence
from typing import TypeAlias

from dash import dcc, html

from cacheprobe.dashboard.shelf import Shelf
from cacheprobe.dashboard.tabs.results import KINDS, kind_of
from cacheprobe.plots.diagrams import svg
from cacheprobe.plots.diagrams.card_style import CARD_CSS, GRID_CSS
from cacheprobe.plots.style import DIAGRAM_CSS, SHADE_CSS, THEME_CSS
from cacheprobe.plots.text import markup
from cacheprobe.plots.thoughts.strokes import WAITING

Element: TypeAlias = object
"""A component of dash, which creates their classes at run time; None shows nothing."""

TABS = (
    ("replay", "Replay"),
    ("thoughts", "Thoughts"),
    ("compare", "Compare"),
    *((kind, name) for kind, name, *_ in KINDS),
)


def index(shelf: Shelf) -> str:
    """Returns the HTML that Dash fills. Its body lists the runs and results, so the page knows them before it loads
    more.
    """
    listed = {"first": shelf.first, "runs": _runs(shelf), "results": [kind_of(path) for path in shelf.results]}
    about = markup(json.dumps(listed)).replace("{%", "&#123;%")
    return (
        '<!DOCTYPE html><html lang="en"><head>{%metas%}<title>{%title%}</title>{%favicon%}'
        f"<style>{DIAGRAM_CSS}{SHADE_CSS}{GRID_CSS}{CARD_CSS}{THEME_CSS}</style>{{%css%}}</head>"
        f'<body class="cp" data-shelf="{about}">{svg.TEXTURES}{WAITING}{{%app_entry%}}'
        "<footer>{%config%}{%scripts%}{%renderer%}</footer></body></html>"
    )


def _runs(shelf: Shelf) -> list[dict[str, object]]:
    """Returns the options of the menu of runs."""
    return [
        {
            "label": entry.name if entry.book else f"{entry.name} (cannot be opened)",
            "value": i,
            "disabled": not entry.book,
        }
        for i, entry in enumerate(shelf.entries)
    ]


def layout(shelf: Shelf) -> Element:
    """Returns the page's components."""
    return html.Div(
        [
            _header(shelf),
            _broken(shelf),
            html.Div(id="notice", role="status", hidden=True),
            _transport(),
            _tabs(),
            html.Main(
                [
                    _panel("replay", _replay()),
                    _panel("thoughts", [_place("thoughts")]),
                    _panel(
                        "compare", [html.Div(_menu("against", "compare with"), className="menus"), _place("compare")]
                    ),
                    _panel("results", _results(shelf)),
                ]
            ),
            html.Div(id="tip", hidden=True),
        ],
        id="page",
        className="cp dash",
    )


def _header(shelf: Shelf) -> Element:
    return html.Header(
        [
            html.Div([html.Span("cacheprobe", className="brand"), html.Span(id="says")], className="title"),
            _menu("run", "run", _runs(shelf)),
            _menu("request", "request"),
            html.Button("◐", id="theme", className="icon", title="light or dark", **{"data-intent": "theme"}),
        ],
        className="top",
    )


def _broken(shelf: Shelf) -> Element:
    """Returns a list of the runs that cannot be opened, with the reasons."""
    broken = [entry for entry in shelf.entries if entry.book is None]
    if not broken:
        return None
    items = [html.Li([html.B(entry.name), f": {entry.reason}"]) for entry in broken]
    return html.Div([f"{len(broken)} of {len(shelf.entries)} could not be opened.", html.Ul(items)], className="broken")


def _transport() -> Element:
    def button(sign: str, says: str, **intent: str) -> Element:
        """Returns a button with a sign and a tip."""
        return html.Button(sign, className="icon", title=says, **{f"data-{k}": v for k, v in intent.items()})

    return html.Section(
        [
            html.Div(
                [
                    button("‹", "one step back (left arrow)", intent="step", by="-1"),
                    html.Button("▶", id="play", className="icon play", title="play", **{"data-intent": "play"}),
                    button("›", "one step on (right arrow)", intent="step", by="1"),
                ],
                className="buttons",
            ),
            html.Div(
                dcc.Slider(id="step", min=0, max=1, step=1, value=0, marks=None, updatemode="drag",
                           allow_direct_input=False, tooltip={"placement": "bottom", "always_visible": False}),
                className="slide",
            ),
            html.Div(id="now", role="status"),
            html.Div(id="insight-view", role="status"),
        ],
        id="transport",
        className="transport",
        **{"aria-label": "replay"},
    )  # fmt: skip


def _tabs() -> Element:
    return html.Nav(
        [
            html.Button(name, id=f"tab-{key}", className="tab", role="tab", **{"data-intent": "tab", "data-tab": key})
            for key, name in TABS
        ],
        className="tabs",
        role="tablist",
    )


def _panel(name: str, children: list[Element]) -> Element:
    return html.Div(children, id=f"panel-{name}", className="tabpanel", role="tabpanel", hidden=name != "replay")


def _place(name: str, classes: str = "", below: Sequence[Element] = ()) -> Element:
    inside = [html.Div(className="waiting"), html.Div(id=f"{name}-view"), *below]
    return html.Section(inside, className=f"card {classes}", id=f"{name}-card")


def _contributions() -> Element:
    """Returns the button that computes the logit attribution from kept states, which takes longer than the card."""
    button = html.Button("What gave this logit?", className="plain", **{"data-intent": "gave"})
    return html.Div([button, html.Div(_figure("gave"), id="gave-box", hidden=True)], className="gave")


def _replay() -> list[Element]:
    return [
        html.Div([_place("timeline", "wide"), _place("decode"), _place("cache", "side")], className="grid"),
        html.Div([_lens(), _place("card", "side", [_contributions()])], className="grid"),
        _place("window"),
        _place("prompt"),
    ]


def _lens() -> Element:
    colours = [("logprob", "log-probability"), ("entropy", "entropy"), ("rank", "rank")]
    rows = [("committed", "committed path"), ("all", "with rows that lost")]
    return html.Section(
        [
            html.Div(className="waiting"),
            html.Div(
                [
                    _menu("site", "site"),
                    _menu("lens", "lens"),
                    _menu("colour", "colour", [{"value": v, "label": w} for v, w in colours]),
                    _menu("rows", "rows", [{"value": v, "label": w} for v, w in rows]),
                ],
                className="menus",
            ),
            html.P(id="lens-why", className="note", hidden=True),
            html.Div(id="grid-view"),
        ],
        className="card",
        id="lens-card",
    )


def _results(shelf: Shelf) -> list[Element]:
    kinds = [kind_of(path) for path in shelf.results]
    buttons = [
        html.Button(
            path.parent.name if kind == "sweep" else path.stem,
            className="plain",
            **{"data-intent": "result", "data-result": str(i), "data-kind": kind},
        )
        for i, (path, kind) in enumerate(zip(shelf.results, kinds, strict=True))
    ]
    empty = [
        html.Section(
            [html.H2(absent), html.P([remedy[0], html.Code(remedy[1])], className="note")],
            className="card",
            **{"data-kind": kind},
        )
        for kind, _, absent, remedy in KINDS
        if kind not in kinds
    ]
    inside = [html.Div(className="waiting"), *_figure("result")]
    return [
        html.Div(buttons, className="verdicts", id="result-list"),
        *empty,
        html.Section(inside, className="card", id="result-card"),
    ]


def _figure(name: str) -> list[Element]:
    """Returns three places: for the text of a figure, for the figure, and for what follows. The first figure loads
    plotly.
    """
    return [
        html.Div(id=f"{name}-view"),
        html.Div(className="plot", id=f"{name}-place", hidden=True),
        html.Div(id=f"{name}-more"),
    ]


def _menu(name: str, label: str, options: Sequence[Element] = ()) -> Element:
    return html.Div(
        [
            html.Label(label, htmlFor=name),
            dcc.Dropdown(id=name, options=list(options), clearable=False, searchable=False, maxHeight=320),
        ],
        className=f"menu menu-{name}",
    )
