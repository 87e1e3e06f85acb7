"""Lets one run compute at a time: other threads wait, and a second run inside a run's step is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident, local

from cacheprobe.core.live import LiveModule
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.settings import plain_settings


class _Computing:
    """A lock that its holder may enter again, and may lend to a thread that the holder waits for."""

    def __init__(self) -> None:
        self._lock, self._lent, self._held = RLock(), set[int](), local()

    def __enter__(self) -> None:
        is_lent = get_ident() in self._lent
        if not is_lent:
            self._lock.acquire()
        self._held.__dict__.setdefault("locks", []).append(not is_lent)

    def __exit__(self, *exc: object) -> None:
        if self._held.locks.pop():
            self._lock.release()

    @contextmanager
    def lent_to(self, thread: int | None) -> Iterator[None]:
        """Lets another thread compute inside the `with`, while the caller only waits for it. None: no thread."""
        if thread is None:
            yield
            return
        self._lent.add(thread)
        try:
            yield
        finally:
            self._lent.discard(thread)


computing = _Computing()
"""Held while a model computes or has our hooks on it. One lock for all models: torch's default dtype and environment
variables belong to the process, and two runs that draft for each other cannot deadlock."""

_in_step: set[int] = set()
"""Ids of the live models whose run is in the middle of a step. Read and written only by the holder of `computing`."""


def live_model(model: object) -> LiveModule:
    """Returns the module that computes: the transformers model that a bridge, its fast forward and other wrappers
    share."""
    origin = getattr(model, "origin", model)
    if (bridge := getattr(origin, "bridge", None)) is not None:
        return bridge.original_model
    return getattr(origin, "model", origin)


def require_idle(model: CachedLM) -> None:
    """Raises: ModelError if this thread is inside a step of another run of this model."""
    with computing:
        if id(live_model(model)) in _in_step:
            raise ModelError(
                f"{model.name} is in the middle of a step of another run: a hook, a lens or a drafter started a run of "
                "its own; start it after the step, or load a second model"
            )


@contextmanager
def turn(model: CachedLM) -> Iterator[None]:
    """Runs the steps inside the `with` without interruption: no other thread computes, and settings are plain.

    Raises: ModelError inside a step of another run of the same model.
    """
    with computing:
        require_idle(model)
        key = id(live_model(model))
        _in_step.add(key)
        try:
            with plain_settings():
                yield
        finally:
            _in_step.discard(key)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Decorates a function so that it waits until no other thread computes, and runs in plain settings."""
    with computing, plain_settings():
        yield
