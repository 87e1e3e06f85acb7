"""Lets one run compute at a time: runs of other threads wait for it, and a run inside its steps is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident, local
from typing import Any

from cacheprobe.models.base import ModelError
from cacheprobe.models.settings import plain_settings


class _Computing:
    """A lock that its holder may enter again, and may lend to a thread that it waits for."""

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
        """Inside the `with`, in which the caller only waits, that thread may compute as the caller might."""
        if thread is None:
            yield
            return
        self._lent.add(thread)
        try:
            yield
        finally:
            self._lent.discard(thread)


computing = _Computing()
"""Held while a model computes or has our hooks on it. One for all models: torch's default dtype and the environment
variables that transformers reads belong to the process, and two runs that draft for each other wait for no circle."""

_in_step: set[int] = set()
"""Ids of the live models whose run is in the middle of a step. Read and written by the holder of `computing`."""


def live_model(model: Any) -> Any:
    """Returns the module that computes: the transformers model that a twin, its bridge and a second wrapper share."""
    origin = getattr(model, "origin", model)
    if (bridge := getattr(origin, "bridge", None)) is not None:
        return bridge.original_model
    return getattr(origin, "model", origin)


def require_idle(model: Any) -> None:
    """Raises: ModelError where this thread is inside a step of another run of this model."""
    with computing:
        if id(live_model(model)) in _in_step:
            raise ModelError(
                f"{model.name} is in the middle of a step of another run: a hook, a lens or a drafter started a run of "
                "its own; start it after the step, or load a second model"
            )


@contextmanager
def turn(model: Any) -> Iterator[None]:
    """Around the steps of a run that follow each other undisturbed: no other thread computes, settings are plain.

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
    """Around a function, as a decorator: it waits for other threads' computing, and runs in plain settings."""
    with computing, plain_settings():
        yield
