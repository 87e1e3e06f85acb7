"""Builds the Dash app, with one address (/ask) that answers the questions of the page's script (assets/talk.js), and
opens its web server on a host and port."""

import json
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from errno import EADDRINUSE
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread

from dash import ClientsideFunction, Dash, Input
from flask import Response, abort, request
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from cacheprobe.core.terminal import DASH_PORT
from cacheprobe.views.dashboard import facts, shell
from cacheprobe.views.dashboard.questions import CannotShow, PageAnswer, PageQuestion, answered, one_of
from cacheprobe.views.dashboard.reader import RECORDED
from cacheprobe.views.dashboard.run_list import RunList
from cacheprobe.views.dashboard.run_tables import RunTables
from cacheprobe.views.dashboard.tabs import VIEWS
from cacheprobe.views.dashboard.tabs.lens import RowCard
from cacheprobe.views.dashboard.tabs.notes import write_note
from cacheprobe.views.dashboard.tabs.rejected import walk
from cacheprobe.views.dashboard.tabs.replay import map_of_run, overview
from cacheprobe.views.dashboard.tabs.text import range_view
from cacheprobe.views.dashboard.view import csv_text

CONTROLS = ("run", "request", "step", "site", "lens", "colour", "rows", "against", "measure")
"""Ids of the menus and the slider, in the order of assets/talk.js."""
ASSETS = Path(__file__).parent / "assets"
MOST_BYTES, MOST_DEEP = 16 * 2**10, 4
"""Largest size of the page's questions in one request, in bytes, and how deep their objects and lists are nested: the
question inside of one that exports a view has lists of two numbers."""
MOST_KEPT = 64
"""Largest number of kept answers; most have less than 0.5 MB."""
KEPT = frozenset(
    "story summary tokens overview map timeline decode cache window card insight text range grid gave rejected "
    "thoughts compare".split()
)
"""Views whose answer is decided by the question alone, for a run that does not grow and the readings that it recorded.
What a lens reads now depends on files, which may change."""


Views = dict[str, Callable[[PageQuestion], str | PageAnswer]]


def make_app(run_list: RunList) -> Dash:
    """Returns the Dash app over the runs and results of `run_list`. The page loads no file from other servers."""
    app = Dash(
        "cacheprobe",
        title="cacheprobe",
        update_title=None,
        assets_folder=str(ASSETS),
        assets_ignore=r".*\.js$",  # `shell.index` loads the scripts first, so that they ask while Dash starts
        serve_locally=True,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    app.index_string = shell.index(run_list, [app.get_asset_url(path.name) for path in sorted(ASSETS.glob("*.js"))])
    app.layout = shell.layout(run_list)
    app.clientside_callback(ClientsideFunction("cacheprobe", "heard"), *(Input(name, "value") for name in CONTROLS))
    answers = Answers(run_list, views_of(run_list))

    @app.server.before_request
    def refuse_other_posts() -> None:
        """Refuses what is posted elsewhere: Dash would read it as a callback, and this app has none on the server."""
        if request.method == "POST" and request.path not in ("/ask", "/note"):
            abort(Response("questions are posted to /ask, notes to /note\n", 400))

    @app.server.post("/ask")
    def ask() -> Response:
        """Answers one POST of questions, {view: question}, as a stream, one line of JSON for each view."""
        return Response(
            answers.lines(_asked(answers.views)), mimetype="application/x-ndjson", headers={"Cache-Control": "no-store"}
        )

    @app.server.post("/note")
    def note() -> PageAnswer:
        """Answers one POST, {"note": {...}}, as `write_note` says, with the notes of the run."""
        own = f"{request.scheme}://{request.host}"
        if request.headers.get("Origin", own) != own:  # a page of another site, or a file on this machine
            abort(Response("only the dashboard's own page writes notes\n", 403))
        return answered(partial(write_note, run_list), _asked(("note",)).get("note", {}))

    return app


def _asked(known: Collection[str]) -> dict[str, PageQuestion]:
    """Returns the questions of the request that is being answered; refuses a malformed or too large one, and a question
    that is not `known`."""
    if not request.is_json:  # a form on another site cannot send JSON
        abort(Response("questions are application/json\n", 415))
    if request.headers.get("Transfer-Encoding"):
        abort(Response("questions name their length (Content-Length)\n", 411))
    if (request.content_length or 0) > MOST_BYTES:
        abort(Response(f"questions have at most {MOST_BYTES} bytes\n", 413))
    try:
        questions = json.loads(request.get_data())
    except (ValueError, RecursionError):
        questions = None
    if (
        not isinstance(questions, dict)
        or not all(isinstance(question, dict) for question in questions.values())
        or _is_deeper(questions, MOST_DEEP)
    ):
        abort(Response(f"questions are one JSON object, {{view: {{...}}}}, nested at most {MOST_DEEP} deep\n", 400))
    if unknown := set(questions) - set(known):
        abort(Response(f"there is no view {min(unknown)!r:.40}; there are {', '.join(known)}\n", 400))
    return questions


def _is_deeper(value: object, most: int) -> bool:
    """Returns whether the objects and lists of a JSON value are nested deeper than `most`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (most == 0 or any(_is_deeper(one, most - 1) for one in inner))


class _Failed(Exception):
    """Carries an answer with an error past the cache, which keeps only answers that are returned."""


class Answers:
    """Answers the page's questions as lines of JSON, and keeps the newest answers of runs that do not grow, so that a
    view that was drawn once is not computed again."""

    def __init__(self, run_list: RunList, views: Views) -> None:
        self.run_list = run_list
        self.views = views
        self._kept = lru_cache(maxsize=MOST_KEPT)(self._computed)

    def lines(self, questions: dict[str, PageQuestion]) -> Iterator[str]:
        """Yields one line of JSON for each view, in the order of the questions."""
        for name, question in questions.items():
            yield self.line(name, question)

    def line(self, view: str, question: PageQuestion) -> str:
        """Returns one line of JSON: the view's name and its answer. An answer with an error is not kept."""
        is_kept = view in KEPT and (question.get("lens") or RECORDED) == RECORDED and self._is_fixed(question)
        try:
            return (self._kept if is_kept else self._computed)(view, json.dumps(question, sort_keys=True))
        except _Failed as error:
            return str(error)

    def _computed(self, view: str, question: str) -> str:
        """Returns the line of an answer. question: as JSON. Raises: _Failed with the line of an error."""
        answer = answered(self.views[view], json.loads(question))
        line = json.dumps({"view": view, **answer}) + "\n"
        if "error" in answer:
            raise _Failed(line)
        return line

    def _is_fixed(self, question: PageQuestion) -> bool:
        """Returns whether no run that the question names is recorded while the dashboard shows it."""
        try:
            named = [question[name] for name in ("run", "against") if question.get(name) is not None]
            return all(self.run_list.follower(number) is None for number in named)
        except CannotShow:
            return False


def views_of(run_list: RunList) -> Views:
    """Returns a dict from the name of each of the page's questions to the function that answers it."""
    answering: dict[str, Callable[[RunList, PageQuestion], str | PageAnswer]] = {
        "facts": facts.run_facts, "growth": facts.growth, "story": facts.request_story, "overview": overview,
        "map": map_of_run,
        "walk": walk, "range": range_view, "export": export, "insight": lambda *asked: RowCard(*asked).sentence(),
    }  # fmt: skip
    answering |= {name: lambda *asked, view=view: view(*asked).draw() for name, view in VIEWS.items()}
    return {name: partial(answer, run_list) for name, answer in answering.items()}


def export(run_list: RunList, question: PageQuestion) -> PageAnswer:
    """Returns the table of a view as CSV, or its code, as a dict for the page: csv or code; and with the CSV of a run
    that is not finished, recorded: how far it is, for the name of the file, because the CSV can hold more than the page
    shows.

    question: view; way, "csv" or "code"; question, the one that the view answered.
    """
    view, way = one_of(question["view"], "view", tuple(VIEWS)), one_of(question["way"], "way", ("csv", "code"))
    asked = question["question"]
    if not isinstance(asked, dict):
        raise CannotShow(f"question is an object, got {asked!r:.40}")
    shown = VIEWS[view](run_list, asked)
    if way == "code":
        return {"code": "\n".join(shown.code()) + "\n"}
    is_growing = asked.get("run") is not None and "growing" in shown.tables.run.meta
    recorded = {"recorded": f"recorded up to step {shown.tables.steps.stop - 1}"} if is_growing else {}
    return {**recorded, "csv": csv_text(shown.table())}


def listen(run_list: RunList, host: str = "127.0.0.1", port: int = DASH_PORT) -> BaseWSGIServer:
    """Returns a web server of the dashboard that is bound to its address; it answers once the caller calls
    `serve_forever()`. Starts a thread that computes the tables of the first run that can be opened.

    port: 0 for any free port.
    Raises: OSError if the address cannot be used; the message says what to give instead.
    """
    app = make_app(run_list)
    _guard(app, host)
    if run_list.entries and (tables := run_list.entries[run_list.first].tables) is not None:
        Thread(target=_warm, args=(tables,), daemon=True).start()
    with _bound_socket(host, port) as bound:  # werkzeug copies the socket; given a taken port, it would end the program
        return make_server(host, port, app.server, threaded=True, request_handler=_Quiet, fd=bound.fileno())


LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")


def _guard(app: Dash, host: str) -> None:
    """Protects the app against other sites: the browser may fetch from this server only, and a server on a local host
    answers only requests for a local host name. A server that other machines can reach takes no notes."""
    hashes = " ".join(app.csp_hashes())
    policy = f"default-src 'self'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; "
    policy += "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    policy += "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

    @app.server.before_request
    def refuse_strangers() -> None:
        """Answers status 403 if the server is local and the request names another host than 127.0.0.1, localhost or
        ::1."""
        name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if host in LOCAL and name not in LOCAL:
            said = f"this server answers to {', '.join(LOCAL)} alone; start it with --host to change that\n"
            abort(Response(said, 403))
        if request.path == "/note" and host not in LOCAL:
            said = (
                f"this server listens at {host}, where other machines reach it, so it takes no notes; write them with "
            )
            abort(Response(f"{said}trace.notes.add in Python, or start it without --host\n", 403))

    @app.server.after_request
    def add_policy(response: Response) -> Response:
        """Adds the security headers to a response, and returns the response."""
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both_families = host == "::" and socket.has_dualstack_ipv6()  # "::" then means every address of IPv6 and IPv4
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both_families)
    except OSError as error:
        reason = "another program listens there" if error.errno == EADDRINUSE else error.strerror or str(error)
        raise OSError(
            f"cannot listen at {host}, port {port}: {reason}; give another --port, 0 for any that is free, or --host"
        ) from error


def _warm(tables: RunTables) -> None:
    """Computes a run's derived tables while the browser opens, and ignores errors."""
    with suppress(Exception):
        _ = tables.tokens
        tables.warm()
        _ = tables.request_texts, tables.rejected


class _Quiet(WSGIRequestHandler):
    """Handles requests as werkzeug does, but logs only those that failed with a server error."""

    protocol_version = "HTTP/1.1"  # allows chunks: lines of an answer are sent before its length is known
    disable_nagle_algorithm = True  # send each piece of an answer at once

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Logs the request if its status code is 5xx, a server error."""
        if str(code).startswith("5"):
            super().log_request(code, size)
