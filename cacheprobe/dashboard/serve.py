"""The server: one process, its address printed once it listens."""

import socket
from contextlib import suppress
from errno import EADDRINUSE
from threading import Thread

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from cacheprobe.dashboard.app import guard, make_app
from cacheprobe.dashboard.book import Book
from cacheprobe.dashboard.shelf import Shelf


def listen(shelf: Shelf, host: str = "127.0.0.1", port: int = 8050) -> BaseWSGIServer:
    """A server that is bound and answers from `serve_forever()` on. port: 0 for any that is free.

    Raises: OSError where the address cannot be had, with what to give instead.
    """
    app = make_app(shelf)
    guard(app, host)
    if shelf.entries and (book := shelf.entries[shelf.first].book) is not None:
        Thread(target=_warm, args=(book,), daemon=True).start()
    with _bound(host, port) as held:  # werkzeug, which makes a copy, would end the program where the port is taken
        return make_server(host, port, app.server, threaded=True, request_handler=_Quiet, fd=held.fileno())


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    every = host == "::" and socket.has_dualstack_ipv6()  # as 0.0.0.0 is every address of IPv4, of IPv6 and IPv4 too
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=every)
    except OSError as error:
        why = "another program listens there" if error.errno == EADDRINUSE else error.strerror or str(error)
        raise OSError(
            f"cannot listen at {host}, port {port}: {why}; give another --port, 0 for any that is free, or --host"
        ) from error


def _warm(book: Book) -> None:
    """While the browser is opened. What is wrong with the run is said when a view asks for it."""
    with suppress(Exception):
        book.warm()


class _Quiet(WSGIRequestHandler):
    """Says nothing of requests that went well. Werkzeug closes the connection after each answer."""

    protocol_version = "HTTP/1.1"  # which has chunks: an answer's lines are sent as they come, its length not yet known
    disable_nagle_algorithm = True  # an answer is sent in pieces, and none of them waits for the next

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if str(code).startswith("5"):
            super().log_request(code, size)
