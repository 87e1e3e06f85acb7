"""Guards a run: keeps other runs out of its steps, and notices changed numeric settings and edited weights."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from cacheprobe.engine.fingerprint import Fingerprint, require_same
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import numeric_settings, require_one_flush_mode
from cacheprobe.models.turns import hold_model, live_model, require_idle


def require_ready(model: CachedLM) -> None:
    """Raises: ModelError if this thread is inside a step of another run of the model, or if only some threads flush
    denormal numbers."""
    require_idle(model)
    require_one_flush_mode()


class RunGuard:
    """Keeps the numeric settings and the weights' versions that a run began with, and checks that they are unchanged.

    The run's hooks are on the model during the run's own steps only, so that several streams may use one model.
    """

    def __init__(self, model: CachedLM, fingerprint: Callable[[], Fingerprint]) -> None:
        self.model, self._fingerprint = model, fingerprint
        self._settings, self._versions = numeric_settings(), _versions(model)
        with hold_model(model):
            self.fingerprint = fingerprint()

    @contextmanager
    def holding(self, hooks: AbstractContextManager[object]) -> Iterator[None]:
        """Inside the `with`, for the caller's steps, the run's hooks are on the model and runs of other threads wait.

        Raises: FingerprintMismatch if a numeric setting changed since the run began; ModelError inside a step of
        another run of the model.
        """
        with hold_model(self.model), hooks:
            self._require_settings()
            yield

    def _require_settings(self) -> None:
        """Raises: FingerprintMismatch if a numeric setting of the process changed since the run began."""
        what = "two steps of one run, which must end before a setting is changed,"
        require_same(self._settings, numeric_settings(), what)

    def require_unchanged(self, had_pauses: bool) -> None:
        """Raises: FingerprintMismatch if numeric settings or weights have changed since the run began.

        had_pauses: the caller's code ran between steps, so all bytes of the weights are read again. Otherwise the
            weights are read again only if a setting changed, or if `_versions` differs: a weight was edited or moved.
        """
        if had_pauses or numeric_settings() != self._settings or _versions(self.model) != self._versions:
            what = "begin and end of one run, which must end before weights or settings are changed,"
            require_same(self.fingerprint, self._fingerprint(), what)


def _versions(model: CachedLM) -> tuple[tuple[int, int], ...]:
    """Returns (address, edit count) of every parameter; edits through `weight.data` are not counted."""
    live = live_model(model)
    weights = live.parameters() if hasattr(live, "parameters") else ()
    return tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights)
