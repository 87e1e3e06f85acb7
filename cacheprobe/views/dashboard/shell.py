"""Builds the page as Dash components: header, replay controls, tabs, and an empty card for every view, which the
scripts in assets/ fill."""

import json
from collections.abc import Sequence
from typing import TypeAlias

from dash import dcc, html

from cacheprobe.core.hook_names import SITE_NAMES, site_label
from cacheprobe.trace.notes import MOST_LETTERS
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.tabs.results import KINDS, kind_of
from cacheprobe.views.dashboard.view import WAYS
from cacheprobe.views.diagrams import svg
from cacheprobe.views.style import PICTURE_CSS, THEME_CSS
from cacheprobe.views.text import markup

Element: TypeAlias = object
"""Dash component. Dash creates the classes of components at import, so no type names them. None shows nothing."""

TABS = (
    ("overview", "Overview"),
    ("replay", "Replay"),
    ("rejected", "Rejected drafts"),
    ("thoughts", "Thoughts"),
    ("compare", "Compare"),
    *((kind, name) for kind, name, _ in KINDS),
)


def index(run_list: RunList, scripts: Sequence[str]) -> str:
    """Returns the HTML document that Dash fills. Its body lists the runs and results as JSON, so that the page's script
    knows them before its first question. scripts: addresses of the page's own scripts, which come before Dash's."""
    content = {
        "first": run_list.first,
        "runs": _runs(run_list),
        "sizes": [len(entry.tables.run.requests) if entry.tables else 0 for entry in run_list.entries],
        "results": [kind_of(path) for path in run_list.results],
        "absent": _absent_tabs(run_list),
        "sites": {site: site_label(site) for site in SITE_NAMES},
        "ways": WAYS,
        "grows": any(entry.follower is not None for entry in run_list.entries),
    }
    own = "".join(f'<script src="{markup(script)}"></script>' for script in scripts)
    content_json = markup(json.dumps(content)).replace("{%", "&#123;%")
    return (
        '<!DOCTYPE html><html lang="en"><head>{%metas%}<title>{%title%}</title>{%favicon%}'
        f"<style>{PICTURE_CSS}{THEME_CSS}</style>{{%css%}}</head>"
        f'<body class="cp" data-listed="{content_json}">{svg.TEXTURES}{{%app_entry%}}'
        f"<footer>{{%config%}}{own}{{%scripts%}}{{%renderer%}}</footer></body></html>"
    )


def _absent_tabs(run_list: RunList) -> dict[str, str]:
    """Returns the tabs that have nothing to show, whatever run is chosen, with a sentence that says why.
    `facts.absent_tabs` has those of a run."""
    kinds = {kind_of(path) for path in run_list.results}
    absent = {kind: reason for kind, _, reason in KINDS if kind not in kinds}
    if not run_list.entries:
        absent |= {tab: "no run was named" for tab, _ in TABS if tab not in {kind for kind, *_ in KINDS}}
    return absent


def _runs(run_list: RunList) -> list[dict[str, object]]:
    """Returns the options of the menu of runs as a list of dicts: label, value, and whether the option is disabled."""
    entries = enumerate(run_list.entries)
    return [{"label": entry.label, "value": i, "disabled": not entry.tables} for i, entry in entries]


def layout(run_list: RunList) -> Element:
    """Returns the page as one Dash component: header, replay controls, tabs, and empty cards."""
    panels = {
        "overview": [_card("summary"), _card("tokens")],
        "replay": _replay_cards(),
        "rejected": [_card("rejected")],
        "thoughts": [_card("thoughts")],
        "compare": [html.Div(_menu("against", "compare with"), className="menus"), _card("compare", is_figure=True)],
        "results": [_result_buttons(run_list), _card("result", is_figure=True)],
    }
    about = {"className": "tabpanel", "role": "tabpanel"}
    tabs = [html.Div(cards, id=f"panel-{n}", hidden=n != "replay", **about) for n, cards in panels.items()]
    parts = [
        _header(run_list),
        _failed_runs(run_list),
        _growth(),
        html.Div(id="notice", role="status", hidden=True),
        html.Div([_transport(), _tabs()], className="stays"),
        html.Main(tabs),
        html.Div(id="tip", hidden=True),
        html.Div(id="busy", role="status", hidden=True),
        html.Div(id="zoom-mark", hidden=True),
        html.Dialog(id="keys", **{"aria-label": "keys and words"}),  # assets/keys.js fills and opens it
        _export_dialog(),
        html.Dialog(
            id="note", **{"data-most": MOST_LETTERS, "aria-labelledby": "note-title"}
        ),  # assets/notes.js fills it
    ]
    return html.Div(parts, id="page", className="cp dash")


def _button(text: str, classes: str = "plain", **more: object) -> Element:
    """Returns a button. more: attributes; names and values of data-attributes as data_name."""
    return html.Button(text, className=classes, **{name.replace("data_", "data-"): v for name, v in more.items()})


def _header(run_list: RunList) -> Element:
    title = html.Div([html.Span("cacheprobe", className="brand"), html.Span(id="says")], className="title")
    menus = [_menu("run", "run", _runs(run_list)), _menu("request", "request")]
    keys = _button("?", "icon", id="keys-open", title="keys and words")
    theme = _button("◐", "icon", id="theme", title="light or dark", data_intent="theme")
    return html.Header([title, *menus, keys, theme], className="top")


def _export_bar(view: str) -> Element:
    """Returns the bar of buttons of a view, which assets/exports.js makes."""
    about = {"data-ways": " ".join(WAYS), "data-of": view, "aria-label": "export this view"}
    return html.Div(className="exports", role="group", **about)


def _export_dialog() -> Element:
    """Returns the dialog that shows code, and a link that the browser does not let the page copy."""
    buttons = html.Div([_button("Copy", id="exports-copy"), _button("Close")], className="verdicts")
    content = [html.H2(id="exports-title"), html.Pre(id="exports-text"), buttons]
    return html.Dialog(content, id="exports", **{"aria-labelledby": "exports-title"})


def _failed_runs(run_list: RunList) -> Element:
    """Returns a component with the runs that cannot be opened and the reasons; None if every run can be opened."""
    failed = [entry for entry in run_list.entries if entry.tables is None]
    if not failed:
        return None
    items = [html.Li([html.B(entry.name), f": {entry.reason}"]) for entry in failed]
    count = f"{len(failed)} of {len(run_list.entries)} could not be opened."
    return html.Div([count, html.Ul(items)], className="broken")


def _growth() -> Element:
    """Returns a component that says how far a run that is being recorded to disk has come."""
    follow = _button("Follow the newest step", data_intent="follow")
    says = html.P([html.Span(id="growth-says"), " ", html.Code(id="growth-command")])
    share = html.Div(html.Div(id="growth-share"), className="share")
    return html.Section([says, follow, share], id="growth", hidden=True, **{"aria-label": "growth of the run"})


def _transport() -> Element:
    """Returns the controls of the replay."""
    buttons = [
        _button("‹", "icon", title="one step back (left arrow)", data_intent="step", data_by="-1"),
        _button("▶", "icon play", id="play", title="play", data_intent="play"),
        _button("›", "icon", title="one step on (right arrow)", data_intent="step", data_by="1"),
    ]
    slider = dcc.Slider(
        id="step", min=0, max=1, step=1, value=0, marks=None, updatemode="drag", allow_direct_input=False,
        tooltip={"placement": "bottom", "always_visible": False},
    )  # fmt: skip
    bar = [
        html.Div(buttons, className="buttons"),
        html.Div(slider, className="slide"),
        html.Div(id="overview-view"),
        html.Div(id="now", role="status"),
    ]
    parts = [html.Div(bar, className="bar"), html.Div(id="insight-view", role="status")]
    return html.Section(parts, id="transport", className="transport", **{"aria-label": "replay"})


def _tabs() -> Element:
    """Returns the buttons of the tabs, and those that lead to the cards of the replay, most of which are below the
    first screen."""
    about = {"role": "tab", "data_intent": "tab"}
    tabs = [_button(name, "tab", id=f"tab-{key}", data_tab=key, **about) for key, name in TABS]
    cards = {"lens": "Layers", "card": "Token", "cache": "Cache", "timeline": "Timeline", "decode": "Tokens"}
    jumps = [
        _button(name, "jump", title=f"go to: {name.lower()}", data_jump=f"{card}-card")
        for card, name in {**cards, "window": "Window", "notes": "Notes"}.items()
    ]
    group = html.Div(jumps, id="jumps", role="group", **{"aria-label": "on this page"})
    return html.Nav([*tabs, group], className="tabs", role="tablist")


def _card(name: str, below: Sequence[Element] = (), *, is_figure: bool = False) -> Element:
    """Returns the empty card of a view. below: components below it.  is_figure: whether it can have a figure."""
    places = _figure_places(name) if is_figure else [html.Div(id=f"{name}-view"), _export_bar(name)]
    return html.Section([html.Div(className="waiting"), *places, *below], className="card", id=f"{name}-card")


def _figure_places(name: str) -> list[Element]:
    """Returns a list of three empty components, for the text above a figure, for the figure, and for the text below;
    and the bar to export them."""
    places = [html.Div(id=f"{name}-view"), html.Div(className="plot", id=f"{name}-place", hidden=True)]
    return [*places, html.Div(id=f"{name}-more"), _export_bar(name)]


def _replay_cards() -> list[Element]:
    flip = html.Div(_figure_places("flip"), id="flip-box", className="gave", hidden=True)  # assets/flip.js fills it
    gave = html.Div(_figure_places("gave"), id="gave-box", hidden=True)
    note = _button("Pin, or write a note", id="note-open", title="pin the chosen token, or write a note (m)")
    below_card = [
        html.Div([note], className="gave"),
        flip,
        html.Div([_button("What gave this logit?", data_intent="gave"), gave], className="gave"),
    ]
    measures = {
        "verdict": "verdict", "depth": "prediction depth", "entropy": "entropy", "logprob": "log-probability",
        "feature": "feature of a dictionary", "difference": "difference from the other engine",
    }  # fmt: skip
    menu = html.Div(_menu("measure", "colour of the text", _options(measures)), className="menus")
    lens = html.P(id="text-lens", className="note", hidden=True)
    text = _card("text", [html.Div(id="range-view", role="status"), lens, menu])
    tools = [
        _button("Leave zoom", id="timeline-whole", hidden=True, data_zoom="0"),
        _button("−", "icon", title="zoom out (-)", data_zoom="-1"),
        _button("+", "icon", title="zoom in (+); or drag over the steps", data_zoom="1"),
        _button("Most rolled back first", id="timeline-lost", data_intent="lost"),
    ]
    stacks = [
        html.Div([text, _lens_card()], className="stack"),
        html.Div([_card("card", below_card), _card("cache")], className="stack"),
    ]
    timeline = _card("timeline", [_map(), html.Div(tools, id="timeline-tools")])
    return [html.Div(stacks, className="grid"), timeline, _card("decode"), _card("window"), _card("notes")]


def _map() -> Element:
    """Returns the map of the whole run, below the timeline, and the buttons to other pages of requests."""
    ways = {"«": ("first requests", -(10**6)), "‹": ("requests above", -1), "›": ("requests below", 1)}
    ways["»"] = ("last requests", 10**6)
    turns = [html.Span(id="timeline-page", role="status")]
    turns += [
        _button(sign, "icon", title=name, data_intent="turn", data_by=str(by)) for sign, (name, by) in ways.items()
    ]
    says = "All requests and steps; framed: those above. Faint: a pass; full: accepted; strong: rolled back. A click "
    says += "leads there."
    parts = [html.Div(id="map-view"), html.P(says, className="note"), html.Div(turns, className="turns")]
    return html.Div(parts, id="timeline-map", hidden=True)


def _lens_card() -> Element:
    colours = {"logprob": "log-probability", "entropy": "entropy", "rank": "rank"}
    rows = {"committed": "committed path", "all": "all rows"}
    menus = [_menu("site", "site"), _menu("lens", "lens")]
    menus += [_menu("colour", "colour", _options(colours)), _menu("rows", "rows", _options(rows))]
    parts = [
        html.Div(className="waiting"),
        html.Div(menus, className="menus"),
        html.P(id="lens-why", className="note", hidden=True),
        html.Div(id="grid-view"),
        _export_bar("grid"),
    ]
    return html.Section(parts, className="card", id="lens-card")


def _result_buttons(run_list: RunList) -> Element:
    buttons = []
    for i, path in enumerate(run_list.results):
        name = path.parent.name if (kind := kind_of(path)) == "sweep" else path.stem
        buttons.append(_button(name, data_intent="result", data_result=str(i), data_kind=kind))
    return html.Div(buttons, className="verdicts", id="result-list")


def _options(labels: dict[str, str]) -> list[dict[str, str]]:
    return [{"value": value, "label": label} for value, label in labels.items()]


def _menu(name: str, label: str, options: Sequence[Element] = ()) -> Element:
    menu = dcc.Dropdown(id=name, options=list(options), clearable=False, searchable=False, maxHeight=320)
    return html.Div([html.Label(label, htmlFor=name), menu], className=f"menu menu-{name}")
