"""Guards a run against other runs, changed settings and edited weights."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from cacheprobe.engine.fingerprint import Fingerprint, require_same
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import numeric_settings, require_one_flush_mode
from cacheprobe.models.turns import live_model, require_idle, turn


def require_ready(model: CachedLM) -> None:
    """Raises: ModelError if no run of this model can begin now: inside a step of another run, or if the process's
    threads round in two ways."""
    require_idle(model)
    require_one_flush_mode()


class RunGuard:
    """Keeps the settings and weights that a run began with, and checks that they still hold.

    The model has the run's hooks on it in its own turns alone, so that streams may take turns on one model.
    """

    def __init__(self, model: CachedLM, fingerprint: Callable[[], Fingerprint]) -> None:
        self.model, self._fingerprint = model, fingerprint
        self._settings, self._versions = numeric_settings(), _versions(model)
        with turn(model):
            self.fingerprint = fingerprint()

    @contextmanager
    def turn(self, hooks: AbstractContextManager[object]) -> Iterator[None]:
        """Locks out other threads during steps of the run, with the run's hooks on the model.

        Raises: FingerprintMismatch naming a numeric setting that changed since the run began; ModelError inside a step
        of another run of the model.
        """
        with turn(self.model), hooks:
            self._require_settings()
            yield

    def _require_settings(self) -> None:
        what = "two steps of one run, which must end before a setting is changed,"
        require_same(self._settings, numeric_settings(), what)

    def require_unchanged(self, had_pauses: bool) -> None:
        """Raises: FingerprintMismatch if settings or weights are others than at the run's begin.

        had_pauses: read all bytes of the weights again, since the caller's code ran in between; else do so if one was
            edited or moved.
        """
        if had_pauses or numeric_settings() != self._settings or _versions(self.model) != self._versions:
            what = "begin and end of one run, which must end before weights or settings are changed,"
            require_same(self.fingerprint, self._fingerprint(), what)


def _versions(model: CachedLM) -> tuple[tuple[int, int], ...]:
    """Returns the address and edit count of every parameter. Edits through `weight.data` are not counted."""
    live = live_model(model)
    weights = live.parameters() if hasattr(live, "parameters") else ()
    return tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
