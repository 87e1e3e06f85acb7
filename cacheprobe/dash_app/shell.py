"""The page: header, transport, tabs, and a place for every view. What stands in them comes from the callbacks."""

from typing import Any

from dash import dcc, html

from cacheprobe.dash_app.shelf import Shelf
from cacheprobe.views import svg
from cacheprobe.views.style import BLANK_FIGURE, DIAGRAM_CSS, FIGURE_CONFIG, THEME_CSS
from cacheprobe.views.thoughts_strokes import WAITING

TABS = (("replay", "Replay"), ("thoughts", "Thoughts"), ("compare", "Compare"), ("results", "Results"))
INDEX = (
    '<!DOCTYPE html><html lang="en"><head>{%metas%}<title>{%title%}</title>{%favicon%}'
    f"<style>{DIAGRAM_CSS}{THEME_CSS}</style>{{%css%}}</head>"
    f'<body class="cp">{svg.TEXTURES}{WAITING}{{%app_entry%}}'
    "<footer>{%config%}{%scripts%}{%renderer%}</footer></body></html>"
)


def layout(shelf: Shelf) -> Any:
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            *_stores(),
            _header(shelf),
            _broken(shelf),
            html.Div(id="notice", role="status", hidden=True),
            _transport(),
            _tabs(),
            html.Main(
                [
                    _panel("replay", _replay()),
                    _panel("thoughts", [_place("thoughts")]),
                    _panel("compare", [_against(shelf), _place("compare")]),
                    _panel("results", _results(shelf)),
                ]
            ),
        ],
        id="page",
        className="cp dash",
        **{"data-first": str(shelf.first)},
    )


def _stores() -> list[Any]:
    names = ("timeline", "decode", "cache", "window", "card", "thoughts", "compare", "prompt")
    figures = ("grid", "gave", "result")
    ids = ["at", "facts", "story", "intent", "facts-ask", "story-ask"]
    ids += [f"{name}-{kind}" for name in ("facts", "story", "grid") for kind in ("told", "heard")]
    ids += [f"{name}-{kind}" for name in names for kind in ("ask", "html")]
    ids += [f"{name}-{kind}" for name in figures for kind in ("ask", "about")]
    return [dcc.Store(id=name) for name in ids]


def _header(shelf: Shelf) -> Any:
    options = [
        {
            "label": entry.name if entry.book else f"{entry.name} (cannot be opened)",
            "value": i,
            "disabled": not entry.book,
        }
        for i, entry in enumerate(shelf.entries)
    ]
    return html.Header(
        [
            html.Div([html.Span("cacheprobe", className="brand"), html.Span(id="says")], className="title"),
            _menu("run", "run", options),
            _menu("request", "request", []),
            html.Button("◐", id="theme", className="icon", title="light or dark", **{"data-intent": "theme"}),
        ],
        className="top",
    )


def _broken(shelf: Shelf) -> Any:
    """Every run that cannot be opened, with the reason."""
    broken = [entry for entry in shelf.entries if entry.book is None]
    if not broken:
        return None
    items = [html.Li([html.B(entry.name), f": {entry.reason}"]) for entry in broken]
    return html.Div([f"{len(broken)} of {len(shelf.entries)} could not be opened.", html.Ul(items)], className="broken")


def _transport() -> Any:
    def button(sign: str, says: str, **intent: str) -> Any:
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
        ],
        className="transport",
        **{"aria-label": "replay"},
    )  # fmt: skip


def _tabs() -> Any:
    return html.Nav(
        [
            html.Button(name, id=f"tab-{key}", className="tab", role="tab", **{"data-intent": "tab", "data-tab": key})
            for key, name in TABS
        ],
        className="tabs",
        role="tablist",
    )


def _panel(name: str, children: list[Any]) -> Any:
    return html.Div(children, id=f"panel-{name}", className="tabpanel", role="tabpanel", hidden=name != "replay")


def _place(name: str, classes: str = "") -> Any:
    return html.Section(
        [html.Div(className="waiting"), html.Div(id=f"{name}-view")], className=f"card {classes}", id=f"{name}-card"
    )


def _replay() -> list[Any]:
    return [
        html.Div([_place("timeline", "wide"), _place("decode"), _place("cache", "side")], className="grid"),
        html.Div([_lens(), _place("card", "side")], className="grid"),
        _place("window"),
        _place("prompt"),
    ]


def _lens() -> Any:
    sites = [{"value": s, "label": f"{s} · {w}"} for s, w in (("S", "stream"), ("T", "attention"), ("C", "MLP"))]
    colours = [("logprob", "log-probability"), ("entropy", "entropy"), ("rank", "rank")]
    rows = [("committed", "committed path"), ("all", "with rows that lost")]
    return html.Section(
        [
            html.Div(id="grid-head", className="figure-head"),
            html.Div(
                [
                    _menu("site", "site", sites),
                    _menu("lens", "lens", []),
                    _menu("colour", "colour", [{"value": v, "label": w} for v, w in colours]),
                    _menu("rows", "rows", [{"value": v, "label": w} for v, w in rows]),
                ],
                className="menus",
            ),
            html.P(id="lens-why", className="note", hidden=True),
            html.Div(_graph("grid"), className="plot", id="grid-place"),
            html.Div(
                [
                    html.Button("What gave this logit?", className="plain", **{"data-intent": "gave"}),
                    html.Div(id="gave-head", className="figure-head"),
                    html.Div(_graph("gave"), className="plot", id="gave-place", hidden=True),
                ],
                className="gave",
            ),
        ],
        className="card",
        id="lens-card",
    )


def _against(shelf: Shelf) -> Any:
    options = [{"label": e.name, "value": i, "disabled": not e.book} for i, e in enumerate(shelf.entries)]
    return html.Div(_menu("against", "compare with", options), className="menus")


def _results(shelf: Shelf) -> list[Any]:
    buttons = [
        html.Button(path.stem, className="plain", **{"data-intent": "result", "data-result": str(i)})
        for i, path in enumerate(shelf.results)
    ]
    remedy = html.P(["Name a folder of them: ", html.Code("cacheprobe dash RUN analyses/results")], className="note")
    absent = [html.H2("No stored results were named"), remedy]
    place = html.Div(_graph("result"), className="plot", id="result-place", hidden=True)
    inside = [html.Div(id="result-head", className="figure-head"), place]
    return [
        html.Div(buttons, className="verdicts", id="result-list"),
        html.Section(inside if shelf.results else [*absent, html.Div(inside, hidden=True)], className="card"),
    ]


def _menu(name: str, label: str, options: list[Any]) -> Any:
    return html.Div(
        [
            html.Label(label, htmlFor=name),
            dcc.Dropdown(id=name, options=options, clearable=False, searchable=False, maxHeight=320),
        ],
        className=f"menu menu-{name}",
    )


def _graph(name: str) -> Any:
    return dcc.Graph(
        id=name,
        figure=BLANK_FIGURE,
        config={**FIGURE_CONFIG, "displayModeBar": False},
        responsive=True,
        style={"height": "100%"},
    )
