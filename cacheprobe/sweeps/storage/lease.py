"""Lets only one sweep write to an object store: the sweep that has the newest lease. An object store has no file lock.

Leases are numbered objects. A sweep puts the next number on the condition that no such object exists, so only one of
several sweeps succeeds. The sweep renews its lease while it runs. If a sweep was killed, others wait until its lease
has run out, and take the next number. A store that ignores conditions would let every sweep write, and is refused.
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

from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.storage.store import SweepStore

LEASES, SECONDS, RENEWED_EVERY = "lease", 60.0, 15.0
"""Folder of the leases; seconds until a lease runs out; seconds between two renewals."""


class SweepBusy(RuntimeError):
    """Signals that another sweep is writing to the same folder or object store."""


@contextmanager
def leased(store: SweepStore) -> Iterator[None]:
    """Takes the lease of an object store for the time of a `with` block, and renews it in a thread.

    Raises: SweepBusy if another sweep has the lease. The lease is put on the condition that no such object exists:
    ValueError if the store ignores this condition, OSError if the store refuses it.
    """
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    name = _take(store, holder)
    over = threading.Event()

    def keep_renewing() -> None:
        """Renews the lease every RENEWED_EVERY seconds, until the lease is lost or `leased` ends."""
        while not over.wait(RENEWED_EVERY):
            with suppress(Exception):  # the next try may work; a lease that runs out costs time, but no shard
                if not renewed(store, name, holder):
                    return

    thread = threading.Thread(target=keep_renewing, daemon=True)
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
    """Renews the lease `name` of `holder`, and returns True. Returns False, and writes nothing, if the lease is lost:
    removed, or followed by a lease with a higher number."""
    if not _is_held(store, name, holder) or _newest(store)[0] != _number(name):
        return False
    store.write(name, _lease(holder))
    return True


def _take(store: SweepStore, holder: str) -> str:
    """Takes the next lease for `holder`, removes older ones, and returns the name of the new lease. Raises: SweepBusy
    if another sweep has the lease."""
    number, last = _newest(store)
    if last is not None and (left := last["until"] - time.time()) > 0:
        raise SweepBusy(
            f"{last['holder']} writes to {store.url}; wait for it, or, if it was killed, {left:.0f} s until its lease "
            "has run out"
        )
    name = f"{LEASES}/{number + 1:08}.json"
    # after a lost answer the put is sent again, and then finds its own lease
    if not store.create(name, _lease(holder)) and not _is_held(store, name, holder):
        raise SweepBusy(f"another sweep began to write to {store.url} at the same moment; wait for it")
    if store.create(name, _lease(holder)):  # a second put must fail, because the lease exists
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


def _newest(store: SweepStore) -> tuple[int, JsonDict | None]:
    """Returns (number, content) of the lease with the highest number; (0, None) if there are no leases."""
    number = max(_numbers(store), default=0)
    return number, store.read_json(f"{LEASES}/{number:08}.json") if number else None


def _numbers(store: SweepStore) -> list[int]:
    """Returns a list with the numbers of all leases in the store; [] without leases."""
    store.fs.invalidate_cache()
    try:
        return [_number(name) for name in store.fs.find(store.path(LEASES))]
    except FileNotFoundError:
        return []


def _number(name: str) -> int:
    return int(PurePosixPath(name).stem)


def _is_held(store: SweepStore, name: str, holder: str) -> bool:
    """Returns True if the lease `name` exists and belongs to `holder`."""
    lease = store.read_json(name)
    return lease is not None and lease["holder"] == holder


def _lease(holder: str) -> bytes:
    """Returns the content of a lease as JSON bytes: the holder, and the time at which the lease runs out."""
    return json.dumps({"holder": holder, "until": time.time() + SECONDS}).encode()
