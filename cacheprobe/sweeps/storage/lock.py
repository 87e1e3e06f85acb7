"""Two sweeps may not write one place at once: a lock of the system keeps a folder, a lease an object store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cacheprobe.sweeps.storage.lease import SweepBusy, leased
from cacheprobe.sweeps.storage.store import SweepStore


@contextmanager
def only_sweep(store: SweepStore, *, alone: bool = False) -> Iterator[None]:
    """alone: the caller knows that nothing else writes to this object store, so no lease is asked for.

    Raises: SweepBusy where another sweep writes there, ValueError where a store cannot tell.
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
    """The lock ends with its process, however that ends."""
    from filelock import FileLock, Timeout

    path = Path(store.path(".lock"))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path, timeout=0):
            yield
    except Timeout:
        raise SweepBusy(f"another sweep writes to {store.url}; wait for it, or give another folder") from None
