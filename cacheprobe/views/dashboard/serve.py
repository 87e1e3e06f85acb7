"""Opens the dashboard's web server on a host and port."""

import socket
from contextlib import suppress
from errno import EADDRINUSE
from threading import Thread

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from cacheprobe.core.terminal import DASH_PORT
from cacheprobe.views.dashboard.app import guard, make_app
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.shelf import Shelf


def listen(shelf: Shelf, host: str = "127.0.0.1", port: int = DASH_PORT) -> BaseWSGIServer:
    """Returns a web server of the dashboard that is bound to its address; it answers once the caller calls
    `serve_forever()`. Starts a thread that computes the tables of the first run that can be opened.

    port: 0 for any free port.
    Raises: OSError if the address cannot be used; the message says what to give instead.
    """
    app = make_app(shelf)
    guard(app, host)
    if shelf.entries and (book := shelf.entries[shelf.first].book) is not None:
        Thread(target=_warm, args=(book,), daemon=True).start()
    with _bound_socket(host, port) as bound:  # werkzeug copies the socket; given a taken port, it would end the program
        return make_server(host, port, app.server, threaded=True, request_handler=_Quiet, fd=bound.fileno())


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


def _warm(book: Book) -> None:
    """Computes a run's derived tables while the browser opens, and ignores errors."""
    with suppress(Exception):
        book.warm()
        _ = book.rejections.drafts


class _Quiet(WSGIRequestHandler):
    """Handles requests as werkzeug does, but logs only those that failed with a server error."""

    protocol_version = "HTTP/1.1"  # allows chunks: lines of an answer are sent before its length is known
    disable_nagle_algorithm = True  # send each piece of an answer at once

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Logs the request if its status code is 5xx, a server error."""
        if str(code).startswith("5"):
            super().log_request(code, size)
