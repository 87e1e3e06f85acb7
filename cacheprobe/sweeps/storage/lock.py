"""Lets only one sweep at a time write to a place: by a file lock for a folder, by a lease for an object store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheprobe.core.files import Locked, only_writer
from cacheprobe.sweeps.storage.lease import SweepBusy, leased
from cacheprobe.sweeps.storage.store import SweepStore


@contextmanager
def only_sweep(store: SweepStore, *, alone: bool = False) -> Iterator[None]:
    """Keeps other sweeps from writing to the store during a `with` block: takes a folder's lock, or a lease.

    alone: the caller guarantees that no other sweep writes to this object store, so no lease is taken.
    Raises: SweepBusy if another sweep writes to the store; ValueError for a folder with `alone`; ValueError if an
    object store ignores the condition that a new object must not exist, OSError if the store refuses this condition.
    """
    if alone:
        if store.is_local:
            raise ValueError(f"{store.url} is a folder, whose lock takes nothing to have; leave out alone (--alone)")
        yield
        return
    with _locked(store) if store.is_local else leased(store):
        yield


@contextmanager
def _locked(store: SweepStore) -> Iterator[None]:
    """Takes the file lock of the store's folder for the time of a `with` block. Raises: SweepBusy if another sweep has
    the lock."""
    path = Path(store.path(".lock"))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with only_writer(path):
            yield
    except Locked as holder:
        raise SweepBusy(
            f"another sweep writes to {store.url} ({holder}); wait for it, or give another folder"
        ) from None
