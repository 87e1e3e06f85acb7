"""Controls who may write to an object store, which has no lock of an operating system: the holder of the newest lease.

Leases are numbered objects. The next number is put on the condition that it does not exist, so only one of several
sweeps gets it. Its holder renews it. If the holder was killed, others wait until the lease has run out, and take the
next number. A store that ignores conditions would let every sweep through; this is tested, and such a store is refused.
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


class SweepBusy(RuntimeError):
    """Raised if another sweep writes to the same place."""


@contextmanager
def leased(store: SweepStore) -> Iterator[None]:
    """Holds the lease of this store during a `with` block.

    Raises: SweepBusy if another sweep has the lease, ValueError if the store does not support conditions.
    """
    holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    name = _take(store, holder)
    over = threading.Event()

    def renew() -> None:
        """Renews the lease until the block ends or the lease is lost."""
        while not over.wait(RENEWED_EVERY):
            with suppress(Exception):  # the next try may work; a lease that runs out costs time, but no shard
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
    """Renews a lease; returns False if the lease ran out and another sweep has taken the next one."""
    if not _is_held(store, name, holder) or _newest(store)[0] != _number(name):
        return False
    store.write(name, _lease(holder))
    return True


def _take(store: SweepStore, holder: str) -> str:
    """Returns the name of a lease that this holder now has."""
    number, held = _newest(store)
    if held is not None and (left := held["until"] - time.time()) > 0:
        raise SweepBusy(
            f"{held['holder']} writes to {store.url}; wait for it, or, if it was killed, {left:.0f} s until its lease "
            "has run out"
        )
    name = f"{LEASES}/{number + 1:08}.json"
    # after a lost answer the put is sent again, and then finds its own lease
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


def _newest(store: SweepStore) -> tuple[int, JsonDict | None]:
    """Returns the highest number and its lease; (0, None) without leases."""
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
