"""Builds the page as Dash components: header, replay controls, tabs, and an empty card for every view, which the
scripts in assets/ fill."""

import json
from collections.abc import Sequence
from typing import TypeAlias

from dash import dcc, html

from cacheprobe.core.hook_names import SITE_NAMES, site_label
from cacheprobe.views.dashboard.away.views import WAYS, bar, dialog
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.dashboard.tabs.results import KINDS, kind_of
from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import CARD_CSS, GRID_CSS
from cacheprobe.views.style import DIAGRAM_CSS, SHADE_CSS, THEME_CSS
from cacheprobe.views.text import markup
from cacheprobe.views.thoughts.strokes import WAITING

Element: TypeAlias = object
"""Dash component. Dash creates the classes of components at import, so no type names them. None shows nothing."""

TABS = (
    ("replay", "Replay"),
    ("rejected", "Rejected drafts"),
    ("thoughts", "Thoughts"),
    ("compare", "Compare"),
    *((kind, name) for kind, name, _ in KINDS),
)


KEYS = (
    ("← →", "one step back, one step on"),
    ("n, p", "next, previous rejected draft, in the order of their list"),
    ("Enter", "in the list: open the rejected draft"),
    ("↑ ↓", "in the list: the line above, the line below"),
    ("/", "search the rejected drafts"),
    ("g", "go to the lens grid"),
    ("← → ↑ ↓", "in the lens grid: another row, another layer"),
    ("+, -, 0", "zoom the timeline in, out, back; or drag over its steps"),
    ("Home, End", "first, last token of the request; in the list: first, last line"),
    ("Tab, Enter", "reach a button or a menu, and press it"),
    ("?", "show or hide this list"),
)
"""Keys of the page, and what each does."""
WORDS = (
    ("S, T, C", "residual stream, attention output, MLP output of a layer"),
    ("row", "one token that one pass read: every layer has states of it, and predicts the next token"),
    ("accepted, rejected", "what the verifying pass said of a drafted token"),
    ("rolled back", "removed again: a rejected draft, and the drafts behind it"),
    ("recovered, bonus", "the verifier's own token: in place of a rejected draft, or after a wholly accepted one"),
    ("superseded", "computed for a draft, and computed again by the pass that verified it"),
    ("prediction depth", "first layer from which the first choice stays the last layer's"),
    ("margin", "log-probability of the committed token minus that of the drafted one, in nats, in the last layer"),
    ("strip under the slider", "all steps, one after the other: green accepted, red rolled back, blue other passes"),
    ("T₀, T₁′, T₁", "newest committed token, first drafted token, the verifier's own token there"),
)
"""Words of the page that not every reader knows."""


def index(shelf: Shelf, scripts: Sequence[str]) -> str:
    """Returns the HTML document that Dash fills. Its body lists the runs and results as JSON, so that the page's script
    knows them before its first question. scripts: addresses of the page's own scripts, which come before Dash's."""
    content = {"first": shelf.first, "runs": _runs(shelf), "results": [kind_of(path) for path in shelf.results]}
    content["absent"] = _absent_tabs(shelf)
    content["sites"] = {site: site_label(site) for site in SITE_NAMES}
    content |= {"ways": WAYS, "keys": KEYS, "words": WORDS}
    content["grows"] = any(entry.follower is not None for entry in shelf.entries)
    own = "".join(f'<script src="{markup(script)}"></script>' for script in scripts)
    content_json = markup(json.dumps(content)).replace("{%", "&#123;%")
    return (
        '<!DOCTYPE html><html lang="en"><head>{%metas%}<title>{%title%}</title>{%favicon%}'
        f"<style>{DIAGRAM_CSS}{SHADE_CSS}{GRID_CSS}{CARD_CSS}{THEME_CSS}</style>{{%css%}}</head>"
        f'<body class="cp" data-shelf="{content_json}">{svg.TEXTURES}{WAITING}{{%app_entry%}}'
        f"<footer>{{%config%}}{own}{{%scripts%}}{{%renderer%}}</footer></body></html>"
    )


def _absent_tabs(shelf: Shelf) -> dict[str, str]:
    """Returns the tabs that have nothing to show, whatever run is chosen, with a sentence that says why.
    `facts.absent_tabs` has those of a run."""
    kinds = {kind_of(path) for path in shelf.results}
    absent = {kind: reason for kind, _, reason in KINDS if kind not in kinds}
    if not shelf.entries:
        absent |= {tab: "no run was named" for tab, _ in TABS if tab not in {kind for kind, *_ in KINDS}}
    return absent


def _runs(shelf: Shelf) -> list[dict[str, object]]:
    """Returns the options of the menu of runs as a list of dicts: label, value, and whether the option is disabled."""
    return [{"label": entry.label, "value": i, "disabled": not entry.book} for i, entry in enumerate(shelf.entries)]


def layout(shelf: Shelf) -> Element:
    """Returns the page as one Dash component: header, replay controls, tabs, and empty cards."""
    return html.Div(
        [
            _header(shelf),
            _failed_runs(shelf),
            _growth(),
            html.Div(id="notice", role="status", hidden=True),
            html.Div([_transport(), _tabs()], className="stays"),
            html.Main(
                [
                    _tab_panel("replay", _replay_cards()),
                    _tab_panel("rejected", [_card("rejected")]),
                    _tab_panel("thoughts", [_card("thoughts")]),
                    _tab_panel("compare", _comparison()),
                    _tab_panel("results", _results(shelf)),
                ]
            ),
            html.Div(id="tip", hidden=True),
            html.Div(id="zoom-mark", hidden=True),
            _keys(),
            dialog(),
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
            html.Button("?", id="keys-open", className="icon", title="keys and words"),
            html.Button("◐", id="theme", className="icon", title="light or dark", **{"data-intent": "theme"}),
        ],
        className="top",
    )


def _keys() -> Element:
    """Returns an empty dialog for the lists of keys and words; assets/keys.js fills and opens it."""
    return html.Dialog(id="keys", **{"aria-label": "keys and words"})


def _failed_runs(shelf: Shelf) -> Element:
    """Returns a component with the runs that cannot be opened and the reasons; None if every run can be opened."""
    failed = [entry for entry in shelf.entries if entry.book is None]
    if not failed:
        return None
    items = [html.Li([html.B(entry.name), f": {entry.reason}"]) for entry in failed]
    return html.Div([f"{len(failed)} of {len(shelf.entries)} could not be opened.", html.Ul(items)], className="broken")


def _growth() -> Element:
    """Returns a component that says how far a run is that is recorded to disk."""
    follow = html.Button("Follow the newest step", className="plain", **{"data-intent": "follow"})
    says = html.P([html.Span(id="growth-says"), " ", html.Code(id="growth-command")])
    return html.Section(
        [says, follow, html.Div(html.Div(id="growth-share"), className="share")],
        id="growth",
        hidden=True,
        **{"aria-label": "growth of the run"},
    )


def _transport() -> Element:
    def button(sign: str, says: str, **intent: str) -> Element:
        """Returns a button with a sign and a hover text. intent: names and values of its data-attributes."""
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
            html.Div(id="overview-view"),
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
        ]
        + [_jumps()],
        className="tabs",
        role="tablist",
    )


def _jumps() -> Element:
    """Returns buttons that lead to the cards of the replay, most of which are below the first screen."""
    cards = {
        "lens": "Layers",
        "card": "Token",
        "cache": "Cache",
        "timeline": "Timeline",
        "decode": "Tokens",
        "window": "Window",
    }
    buttons = [
        html.Button(name, className="jump", title=f"go to: {name.lower()}", **{"data-jump": f"{card}-card"})
        for card, name in cards.items()
    ]
    return html.Div(buttons, id="jumps", role="group", **{"aria-label": "on this page"})


def _tab_panel(name: str, children: list[Element]) -> Element:
    return html.Div(children, id=f"panel-{name}", className="tabpanel", role="tabpanel", hidden=name != "replay")


def _card(name: str, classes: str = "", below: Sequence[Element] = ()) -> Element:
    content = [html.Div(className="waiting"), html.Div(id=f"{name}-view"), bar(name), *below]
    return html.Section(content, className=f"card {classes}", id=f"{name}-card")


def _comparison() -> list[Element]:
    """Returns the menu of the other run, and the card of the comparison."""
    content = [html.Div(className="waiting"), *_figure_places("compare")]
    menu = html.Div(_menu("against", "compare with"), className="menus")
    return [menu, html.Section(content, className="card", id="compare-card")]


def _attribution_button() -> Element:
    """Returns a component with a button that computes the logit attribution of a row, and empty places for the
    figure."""
    button = html.Button("What gave this logit?", className="plain", **{"data-intent": "gave"})
    return html.Div([button, html.Div(_figure_places("gave"), id="gave-box", hidden=True)], className="gave")


def _flip_box() -> Element:
    """Returns an empty component for what the card's button "What would have changed it?" shows; assets/flip.js fills
    it."""
    return html.Div(_figure_places("flip"), id="flip-box", className="gave", hidden=True)


def _replay_cards() -> list[Element]:
    return [
        html.Div(
            [
                html.Div([_text_card(), _lens_card()], className="stack"),
                html.Div([_card("card", "", [_flip_box(), _attribution_button()]), _card("cache")], className="stack"),
            ],
            className="grid",
        ),
        _timeline_card(),
        _card("decode"),
        _card("window"),
    ]


def _text_card() -> Element:
    """Returns the card of the request's text, with the menu of measures that colour it, and a place for the numbers of
    a range."""
    measures = [
        ("verdict", "verdict"), ("depth", "prediction depth"), ("entropy", "entropy"), ("logprob", "log-probability"),
        ("feature", "feature of a dictionary"), ("difference", "difference from the other engine"),
    ]  # fmt: skip
    menu = _menu("measure", "colour of the text", [{"value": value, "label": label} for value, label in measures])
    below = [html.Div(id="range-view", role="status"), html.Div(menu, className="menus")]
    return _card("text", below=below)


def _timeline_card() -> Element:
    tools = [
        html.Button("Leave zoom", id="timeline-whole", className="plain", hidden=True, **{"data-zoom": "0"}),
        html.Button("−", className="icon", title="zoom out (-)", **{"data-zoom": "-1"}),
        html.Button("+", className="icon", title="zoom in (+); or drag over the steps", **{"data-zoom": "1"}),
        html.Button("Most rolled back first", id="timeline-lost", className="plain", **{"data-intent": "lost"}),
    ]
    return _card("timeline", "", [html.Div(tools, id="timeline-tools")])


def _lens_card() -> Element:
    colours = [("logprob", "log-probability"), ("entropy", "entropy"), ("rank", "rank")]
    rows = [("committed", "committed path"), ("all", "all rows")]
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
            bar("grid"),
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
    content = [html.Div(className="waiting"), *_figure_places("result")]
    return [
        html.Div(buttons, className="verdicts", id="result-list"),
        html.Section(content, className="card", id="result-card"),
    ]


def _figure_places(name: str) -> list[Element]:
    """Returns a list of three empty components, for the text above a figure, for the figure, and for the text below;
    and the bar to take them away."""
    return [
        html.Div(id=f"{name}-view"),
        html.Div(className="plot", id=f"{name}-place", hidden=True),
        html.Div(id=f"{name}-more"),
        bar(name),
    ]


def _menu(name: str, label: str, options: Sequence[Element] = ()) -> Element:
    return html.Div(
        [
            html.Label(label, htmlFor=name),
            dcc.Dropdown(id=name, options=list(options), clearable=False, searchable=False, maxHeight=320),
        ],
        className=f"menu menu-{name}",
    )
