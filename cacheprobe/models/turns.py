"""Lets one thread compute at a time, and refuses a run that is started inside a step of another run of the same
model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident, local

from cacheprobe.core.live import LiveModule
from cacheprobe.core.process import require_usable_process
from cacheprobe.models.base import CachedLM, ModelError
from cacheprobe.models.settings import plain_settings


class _Computing:
    """Locks the computation of all models for one thread, which may enter again."""

    def __init__(self) -> None:
        self._lock, self._lent, self._of_thread = RLock(), set[int](), local()

    def __enter__(self) -> None:
        took_lock = self._of_thread.__dict__.setdefault("took_lock", [])
        if not took_lock:  # inside, the process is the same
            require_usable_process(is_computing=True)
        is_lent = get_ident() in self._lent
        if not is_lent:
            self._lock.acquire()
        took_lock.append(not is_lent)

    def __exit__(self, *exc: object) -> None:
        if self._of_thread.took_lock.pop():
            self._lock.release()

    @contextmanager
    def lent_to(self, thread: int | None) -> Iterator[None]:
        """Lets the thread with id `thread` compute inside the `with`, while the caller, which has the lock, waits. Does
        nothing if `thread` is None."""
        if thread is None:
            yield
            return
        self._lent.add(thread)
        try:
            yield
        finally:
            self._lent.discard(thread)


computing = _Computing()
"""Lock that a thread takes while a model computes or has our hooks on it. One lock for all models: torch's default
dtype and environment variables belong to the process, and two runs that draft for each other cannot deadlock."""

os.register_at_fork(after_in_child=computing.__init__)  # a lock that another thread of the parent had taken stays taken

_in_step: set[int] = set()
"""Ids of the live models whose run is in the middle of a step. Read and written only by the holder of `computing`."""


def live_model(model: object) -> LiveModule:
    """Returns the module that owns a model's weights: the transformers model of a model around one, the ThinkingModel
    of a ThinkingLM. A plain module is returned unchanged."""
    return getattr(model, "live", model)


def require_idle(model: CachedLM) -> None:
    """Checks that no run of `model` is in the middle of a step in this thread. Waits until no other thread computes.
    Raises: ModelError if a step is unfinished, which means that a hook, a lens or a drafter started a run of its
    own."""
    with computing:
        if id(live_model(model)) in _in_step:
            raise ModelError(
                f"{model.name} is in the middle of a step of another run: a hook, a lens or a drafter started a run of "
                "its own; start it after the step, or load a second model"
            )


@contextmanager
def hold_model(model: CachedLM) -> Iterator[None]:
    """Locks the computation of all models for this thread inside the `with`: other threads wait. Autocast is off and
    float32 is the default dtype.

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
    """Decorates a function, as @one_at_a_time(): the function waits until no other thread computes, then runs with
    autocast off and float32 as the default dtype."""
    with computing, plain_settings():
        yield
