"""The app: what is asked of each view, and by which callback. The page's own state lives in assets/state.js."""

from pathlib import Path
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, no_update
from flask import Response, abort, request

from cacheprobe.dash_app import cache, card, compare, decode, facts, lens, results, shell, thoughts, timeline
from cacheprobe.dash_app.asking import Ask, answered, reason, refusal
from cacheprobe.dash_app.reader import Reader
from cacheprobe.dash_app.shelf import Shelf
from cacheprobe.views.style import BLANK_FIGURE

CONTROLS = ("run", "request", "step", "site", "lens", "colour", "rows", "against")
"""Menus and the slider: each is an input and an output of the one callback that keeps the state."""
MARKUP_VIEWS = ("timeline", "decode", "cache", "window", "card", "thoughts", "compare", "prompt")
FIGURE_VIEWS = ("grid", "gave", "result")


def make_app(shelf: Shelf) -> Dash:
    """A Dash app over what the command line named. Everything is served from this machine."""
    app = Dash(
        "cacheprobe",
        title="cacheprobe",
        update_title=None,
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    reader = Reader(shelf)
    app.index_string = shell.INDEX
    app.layout = shell.layout(shelf)
    _keep_state(app)
    _answer(app, shelf, reader)
    return app


def _keep_state(app: Dash) -> None:
    """Clientside: every control and click becomes one state, and the state becomes questions."""
    options = [Output("request", "options"), Output("site", "options"), Output("lens", "options"),
               Output("step", "min"), Output("step", "max")]  # fmt: skip
    app.clientside_callback(
        ClientsideFunction("cacheprobe", "reduce"),
        Output("at", "data"),
        *(Output(name, "value") for name in CONTROLS),
        *options,
        Input("url", "search"),
        Input("facts", "data"),
        Input("story", "data"),
        Input("intent", "data"),
        *(Input(name, "value") for name in CONTROLS),
        State("at", "data"),
        State("grid-about", "data"),
    )
    app.clientside_callback(  # apart from the state, which would otherwise wait for plotly to be loaded
        ClientsideFunction("cacheprobe", "click"),
        Output("grid-heard", "data"),
        Input("grid", "clickData"),
        prevent_initial_call=True,
    )
    asks = [*MARKUP_VIEWS, *FIGURE_VIEWS, "facts", "story"]
    app.clientside_callback(
        ClientsideFunction("cacheprobe", "ask"),
        *(Output(f"{name}-ask", "data") for name in asks),
        Input("at", "data"),
        Input("facts", "data"),
        Input("story", "data"),
        State("grid-about", "data"),
        *(State(f"{name}-ask", "data") for name in asks),
        prevent_initial_call=True,
    )
    for name in ("facts", "story"):  # handed on outside the graph of callbacks, which would be a circle
        app.clientside_callback(
            ClientsideFunction("cacheprobe", "hear"),
            Output(f"{name}-heard", "data"),
            Input(f"{name}-told", "data"),
            State(name, "id"),
            prevent_initial_call=True,
        )
    for name in MARKUP_VIEWS:
        app.clientside_callback(
            ClientsideFunction("cacheprobe", "draw"),
            Output(f"{name}-view", "data-drawn"),
            Input(f"{name}-html", "data"),
            State(f"{name}-view", "id"),
            prevent_initial_call=True,
        )
    for name in FIGURE_VIEWS:
        app.clientside_callback(
            ClientsideFunction("cacheprobe", "caption"),
            Output(f"{name}-head", "data-drawn"),
            Input(f"{name}-about", "data"),
            State(f"{name}-head", "id"),
            prevent_initial_call=True,
        )
    app.clientside_callback(
        ClientsideFunction("cacheprobe", "point"),
        Output("page", "data-at"),
        Input("at", "data"),
        Input("story", "data"),
        Input("facts", "data"),
    )


def _answer(app: Dash, shelf: Shelf, reader: Reader) -> None:
    markup = {
        "timeline": lambda ask: timeline.view(shelf, ask),
        "decode": lambda ask: decode.view(shelf, ask),
        "cache": lambda ask: cache.view(shelf, ask),
        "window": lambda ask: cache.window_view(shelf, ask),
        "card": lambda ask: card.view(shelf, reader, ask),
        "thoughts": lambda ask: thoughts.view(shelf, ask),
        "compare": lambda ask: compare.view(shelf, ask),
        "prompt": lambda ask: facts.prompt_view(shelf, ask),
    }
    for name in MARKUP_VIEWS:
        app.callback(Output(f"{name}-html", "data"), Input(f"{name}-ask", "data"), prevent_initial_call=True)(
            answered(markup[name])
        )

    @app.callback(Output("facts-told", "data"), Input("facts-ask", "data"), prevent_initial_call=True)
    def tell_facts(ask: Ask) -> Any:
        return facts.run_facts(shelf, reader, ask["run"]) if ask else no_update

    @app.callback(Output("story-told", "data"), Input("story-ask", "data"), prevent_initial_call=True)
    def tell_story(ask: Ask) -> Any:
        try:
            return facts.request_story(shelf, ask) if ask else no_update
        except (ValueError, KeyError, OSError) as error:
            return {"run": ask.get("run"), "error": reason(error)}

    figures = {
        "grid": lambda ask: lens.grid(shelf, reader, ask),
        "gave": lambda ask: lens.contributions(shelf, reader, ask),
        "result": lambda ask: results.view(shelf, ask),
    }
    for name in FIGURE_VIEWS:
        app.callback(
            Output(name, "figure"),
            Output(f"{name}-about", "data"),
            Input(f"{name}-ask", "data"),
            prevent_initial_call=True,
        )(_drawn(figures[name]))


def _drawn(view: Any) -> Any:
    """A callback that answers with a figure and what is to be said of it; a refusal has an empty figure."""

    def answer(ask: Ask | None) -> tuple[Any, dict[str, Any]]:
        if not ask:
            return no_update, no_update
        try:
            figure, about = view(ask)
        except (ValueError, KeyError, OSError) as error:
            return BLANK_FIGURE, {"for": ask, "title": "", "html": refusal(error), "is_empty": True}
        if figure is None:
            return BLANK_FIGURE, {"for": ask, "is_empty": True, **about}
        height = figure.layout.height or 450
        figure.update_layout(height=None, autosize=True)  # it fills its place, which has this height
        return figure, {"for": ask, "html": "", "is_empty": False, "height": height, **about}

    return answer


def guard(app: Dash, host: str) -> None:
    """Nothing may be fetched from elsewhere; and a server on this machine alone answers to this machine's names alone,
    so that no page of another site can speak to it under a name of its own."""
    hashes = " ".join(app.csp_hashes())
    policy = (
        f"default-src 'self'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; "
        "font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    is_local = host in LOCAL

    @app.server.before_request
    def refuse_strangers() -> None:
        name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if is_local and name not in LOCAL:
            abort(
                Response(f"this server answers to {', '.join(LOCAL)} alone; start it with --host to change that\n", 403)
            )

    @app.server.after_request
    def add_policy(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response


LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")
