"""Builds the Dash app, with one address (/ask) that answers the questions of the page's script (assets/talk.js)."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from dash import ClientsideFunction, Dash, Input
from flask import Flask, Response, abort, request

from cacheprobe.views.dashboard import facts, shell
from cacheprobe.views.dashboard.answers import Answers
from cacheprobe.views.dashboard.away.taken import Sources
from cacheprobe.views.dashboard.away.views import take
from cacheprobe.views.dashboard.flip_jobs import FlipJobs
from cacheprobe.views.dashboard.questions import PageAnswer, PageQuestion
from cacheprobe.views.dashboard.reader import RunReader
from cacheprobe.views.dashboard.shelf import Shelf
from cacheprobe.views.dashboard.tabs import (
    cache,
    card,
    compare,
    decode,
    flip,
    lens,
    rejected,
    results,
    text,
    thoughts,
    timeline,
)

CONTROLS = ("run", "request", "step", "site", "lens", "colour", "rows", "against", "measure")
"""Ids of the menus and the slider, in the order of assets/talk.js."""
ASSETS = Path(__file__).parent / "assets"
MOST_BYTES, MOST_DEEP = 16 * 2**10, 4
"""Largest size of the page's questions in one request, in bytes, and how deep their objects and lists are nested: the
question inside of one that takes a view away has lists of two numbers."""

Views = dict[str, Callable[[PageQuestion], str | PageAnswer]]


def make_app(shelf: Shelf) -> Dash:
    """Returns the Dash app over the runs and results of `shelf`. The page loads no file from other servers."""
    app = Dash(
        "cacheprobe",
        title="cacheprobe",
        update_title=None,
        assets_folder=str(ASSETS),
        assets_ignore=r".*\.js$",  # `shell.index` loads the scripts first, so that they ask while Dash starts
        serve_locally=True,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    app.index_string = shell.index(shelf, [app.get_asset_url(path.name) for path in sorted(ASSETS.glob("*.js"))])
    app.layout = shell.layout(shelf)
    app.clientside_callback(ClientsideFunction("cacheprobe", "heard"), *(Input(name, "value") for name in CONTROLS))
    _answer(app.server, Answers(shelf, _views(shelf, RunReader(shelf))))
    return app


def _views(shelf: Shelf, reader: RunReader) -> Views:
    jobs = FlipJobs()
    return {
        "facts": partial(facts.run_facts, shelf, reader),
        "growth": partial(facts.growth, shelf),
        "story": partial(facts.request_story, shelf),
        "overview": partial(timeline.overview, shelf),
        "timeline": partial(timeline.view, shelf),
        "decode": partial(decode.view, shelf),
        "cache": partial(cache.view, shelf),
        "window": partial(cache.window_view, shelf),
        "card": partial(card.view, shelf, reader),
        "insight": partial(card.sentence, shelf),
        "thoughts": partial(thoughts.view, shelf),
        "compare": partial(compare.view, shelf),
        "rejected": partial(rejected.view, shelf),
        "walk": partial(rejected.walk, shelf),
        "text": partial(text.view, shelf),
        "range": partial(text.range_view, shelf),
        "grid": partial(lens.grid, shelf, reader),
        "gave": partial(lens.contributions, shelf, reader),
        "flip": partial(flip.view, shelf, jobs),
        "result": partial(results.view, shelf),
        "away": partial(take, Sources(shelf, reader, jobs)),
    }


def _answer(server: Flask, answers: Answers) -> None:
    """Adds the address POST /ask to the server: the browser sends {view: question}, and gets one line of JSON for each
    view."""

    @server.before_request
    def refuse_other_posts() -> None:
        """Refuses what is posted elsewhere: Dash would read it as a callback, and this app has none on the server."""
        if request.method == "POST" and request.path != "/ask":
            abort(Response("questions are posted to /ask\n", 400))

    @server.post("/ask")
    def ask() -> Response:
        """Answers one POST of questions as a stream, one line of JSON for each view; refuses a malformed or too large
        request."""
        if not request.is_json:  # a form on another site cannot send JSON
            abort(Response("questions are application/json\n", 415))
        if request.headers.get("Transfer-Encoding"):
            abort(Response("questions name their length (Content-Length)\n", 411))
        if (request.content_length or 0) > MOST_BYTES:
            abort(Response(f"questions have at most {MOST_BYTES} bytes\n", 413))
        questions = _parsed(request.get_data())
        if not isinstance(questions, dict) or not all(isinstance(question, dict) for question in questions.values()):
            abort(Response(f"questions are one JSON object, {{view: {{...}}}}, nested at most {MOST_DEEP} deep\n", 400))
        if unknown := set(questions) - set(answers.views):
            abort(Response(f"there is no view {min(unknown)!r:.40}; there are {', '.join(answers.views)}\n", 400))

        def lines() -> Iterator[str]:
            """Yields one line of JSON for each view, in the order of the questions."""
            for name, question in questions.items():
                yield answers.line(name, question)

        return Response(lines(), mimetype="application/x-ndjson", headers={"Cache-Control": "no-store"})


def _parsed(body: bytes) -> object:
    """Returns the JSON value in a body; None for a body that is not JSON, or that is nested deeper than a question."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    nested = [value]
    for _ in range(MOST_DEEP + 1):
        lists = [one.values() if isinstance(one, dict) else one for one in nested if isinstance(one, dict | list)]
        nested = [inner for values in lists for inner in values]
    return None if nested else value


def guard(app: Dash, host: str) -> None:
    """Protects the app against other sites: the browser may fetch from this server only, and a server on a local host
    answers only requests for a local host name."""
    hashes = " ".join(app.csp_hashes())
    policy = (
        f"default-src 'self'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; "
        "font-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    is_local_server = host in LOCAL

    @app.server.before_request
    def refuse_strangers() -> None:
        """Answers status 403 if the server is local and the request names another host than 127.0.0.1, localhost or
        ::1."""
        name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if is_local_server and name not in LOCAL:
            abort(
                Response(f"this server answers to {', '.join(LOCAL)} alone; start it with --host to change that\n", 403)
            )

    @app.server.after_request
    def add_policy(response: Response) -> Response:
        """Adds the security headers to a response, and returns the response."""
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response


LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")
