"""Two sweeps may not write one place at once.

In a folder this is a lock of the operating system, which ends with its process however that ends. An object store has
none: there it is a lease, an object that names its holder and is renewed; a holder that was killed is waited for until
its lease has run out. Not every store can put on a condition, so none is asked to: two sweeps that start in the same
moment may both believe that they hold the lease. They then do the same work twice and commit the same bytes: time is
lost, and no shard.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheprobe.sweeps.store import SweepStore

LEASE, SECONDS, RENEWED_EVERY = "lease.json", 60.0, 15.0


class SweepBusy(RuntimeError):
    """Another sweep writes here."""


@contextmanager
def only_sweep(store: SweepStore) -> Iterator[None]:
    """Raises: SweepBusy where another sweep writes to this store."""
    with _locked(store) if store.is_local else _leased(store):
        yield


@contextmanager
def _locked(store: SweepStore) -> Iterator[None]:
    from filelock import FileLock, Timeout

    path = Path(store.path(".lock"))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise SweepBusy(f"another sweep writes to {store.url}; wait for it, or give another folder") from None


@contextmanager
def _leased(store: SweepStore) -> Iterator[None]:
    mine = {"holder": f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"}
    if (held := _other(store, mine)) is not None:
        left = held["until"] - time.time()
        raise SweepBusy(
            f"{held['holder']} writes to {store.url}; wait for it, or, if it was killed, {left:.0f} s until its lease "
            "has run out"
        )
    _take(store, mine)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEWED_EVERY):
            try:
                _write(store, mine)
            except Exception:  # the next one may get through; a lease that runs out costs time, and no shard
                continue

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        store.fs.rm_file(store.path(LEASE))


def _take(store: SweepStore, mine: dict[str, Any]) -> None:
    """Write the lease and read it back: of two that wrote, the later stands."""
    _write(store, mine)
    if (held := _other(store, mine)) is not None:
        raise SweepBusy(f"{held['holder']} began to write to {store.url} at the same moment; wait for it")


def _write(store: SweepStore, mine: dict[str, Any]) -> None:
    store.write(LEASE, json.dumps({**mine, "until": time.time() + SECONDS}).encode())


def _other(store: SweepStore, mine: dict[str, Any]) -> dict[str, Any] | None:
    """Whoever else holds a lease that has not run out."""
    held = store.read_json(LEASE)
    if held is None or held["holder"] == mine["holder"] or held["until"] < time.time():
        return None
    return held
