"""The server: one process, its address printed once it listens."""

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from cacheprobe.dash_app.app import guard, make_app
from cacheprobe.dash_app.shelf import Shelf


def listen(shelf: Shelf, host: str = "127.0.0.1", port: int = 8050) -> BaseWSGIServer:
    """A server that is bound and answers from `serve_forever()` on. port: 0 for any that is free.

    Raises: OSError where the port is taken.
    """
    app = make_app(shelf)
    guard(app, host)
    return make_server(host, port, app.server, threaded=True, request_handler=_Quiet)


class _Quiet(WSGIRequestHandler):
    """Says nothing of requests that went well, and keeps a connection for more than one."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if str(code).startswith("5"):
            super().log_request(code, size)
