"""Who may write to an object store, which has no lock of an operating system: whoever put the newest lease.

Leases are numbered objects. The next number is put on the condition that it is not there, so of several that want it
one gets it. Its holder renews it; where the holder was killed, others wait until it has run out, and take the number
after it. A store that ignores conditions would let everybody through: it is tried, and refused by name.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

from cacheprobe.sweeps.storage.store import SweepStore

LEASES, SECONDS, RENEWED_EVERY = "lease", 60.0, 15.0


class SweepBusy(RuntimeError):
    """Another sweep writes here."""


@contextmanager
def leased(store: SweepStore) -> Iterator[None]:
    """Hold the lease of this store. Raises: SweepBusy where another has it, ValueError where the store takes no
    conditions."""
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    name = _take(store, holder)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEWED_EVERY):
            with suppress(Exception):  # the next one may get through; a lease that runs out costs time, and no shard
                if not renewed(store, name, holder):
                    return

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(Exception):  # as above
            if _is_held(store, name, holder):
                store.fs.rm_file(store.path(name))


def renewed(store: SweepStore, name: str, holder: str) -> bool:
    """Renew a lease; False where it ran out and another has taken the next one since."""
    if not _is_held(store, name, holder) or _newest(store)[0] != _number(name):
        return False
    store.write(name, _lease(holder))
    return True


def _take(store: SweepStore, holder: str) -> str:
    """The name of a lease that is this holder's."""
    number, held = _newest(store)
    if held is not None and (left := held["until"] - time.time()) > 0:
        raise SweepBusy(
            f"{held['holder']} writes to {store.url}; wait for it, or, if it was killed, {left:.0f} s until its lease "
            "has run out"
        )
    name = f"{LEASES}/{number + 1:08}.json"
    # a put that was sent again because its answer was lost finds its own lease
    if not store.create(name, _lease(holder)) and not _is_held(store, name, holder):
        raise SweepBusy(f"another sweep began to write to {store.url} at the same moment; wait for it")
    if store.create(name, _lease(holder)):
        store.fs.rm_file(store.path(name))
        raise ValueError(
            f"{store.url} ignores conditions on a put (If-None-Match), so two sweeps cannot be kept from writing there "
            "at once; give a store that heeds them, a folder, or --alone where nothing else writes there"
        )
    for older in _numbers(store):
        if older <= number:
            with suppress(FileNotFoundError):
                store.fs.rm_file(store.path(f"{LEASES}/{older:08}.json"))
    return name


def _newest(store: SweepStore) -> tuple[int, dict[str, Any] | None]:
    """The highest number and its lease; 0 and None where there is none."""
    number = max(_numbers(store), default=0)
    return number, store.read_json(f"{LEASES}/{number:08}.json") if number else None


def _numbers(store: SweepStore) -> list[int]:
    store.fs.invalidate_cache()
    try:
        return [_number(name) for name in store.fs.find(store.path(LEASES))]
    except FileNotFoundError:
        return []


def _number(name: str) -> int:
    return int(PurePosixPath(name).stem)


def _is_held(store: SweepStore, name: str, holder: str) -> bool:
    held = store.read_json(name)
    return held is not None and held["holder"] == holder


def _lease(holder: str) -> bytes:
    return json.dumps({"holder": holder, "until": time.time() + SECONDS}).encode()
