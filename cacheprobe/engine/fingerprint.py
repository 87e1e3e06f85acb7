"""Computes the schedule fingerprint of a run: all that a deterministic request's bits depend on, besides its prompt and
sampling settings (model, platform, pass shapes, interventions, cached keys and values).

Guards a run, too: keeps other runs out of its steps, and notices changed numeric settings and edited weights.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Request, fingerprint_differences
from cacheprobe.core.tokens.special import special_token_ids
from cacheprobe.edits.interventions.base import Intervention
from cacheprobe.edits.interventions.editor import intervention_entries
from cacheprobe.engine.sizes import shared_capacity
from cacheprobe.models.base import CachedLM
from cacheprobe.models.settings import hold_model, numeric_settings, require_idle, require_one_flush_mode

Fingerprint = dict[str, str | int | float]


class FingerprintMismatch(ValueError):
    """Raised if two runs have different schedule fingerprints, so that their bits cannot be compared."""


def schedule_fingerprint(
    model: CachedLM,
    config: EngineConfig,
    lens_tile: int,
    interventions: Sequence[Intervention] = (),
    requests: Sequence[Request] = (),
    lens: str = "",
) -> Fingerprint:
    """Returns the schedule fingerprint of a run as a dict: model, platform, shapes, interventions, cache snapshots.

    lens_tile: number of vectors that a lens reads in one pass.  lens: from `lens_identity`; names the lens of Z, on
    which no token or state depends; "" for the logit lens. `max_batch`, the drafter and the prompts are left out.
    """
    facts = model.fingerprint()
    shapes = {
        "window": config.window,
        "group": config.group,
        "capacity": shared_capacity(facts.get("attention"), config.capacity),
        "prefill_chunk": config.prefill_chunk,
        "prefill_group": config.prefill_group,
        "lens_tile": lens_tile,
        "determinism": config.determinism,
        **({} if config.pad_prefill else {"pad_prefill": False}),
    }
    snapshots = [f"request {r.request_id}: {r.cached.digest()}" for r in requests if r.cached is not None]
    cached = {"cached": "; ".join(snapshots)} if snapshots else {}
    read_by = {"lens": lens} if lens else {}
    changes = intervention_entries(interventions, facts, special_token_ids(model))
    return {**facts, **shapes, **changes, **cached, **read_by}


def require_same(a: Fingerprint, b: Fingerprint, what: str) -> None:
    """Raises: FingerprintMismatch if two schedule fingerprints differ; the message names the differing fields.

    what: the two things compared, for the message. The names of model and adapter may differ, the weights may not.
    """
    differing = [f"{key}: {x!r} against {y!r}" for key, x, y in fingerprint_differences(a, b)]
    if differing:
        raise FingerprintMismatch(f"{what} ran under different schedules; {'; '.join(differing)}")


def require_ready(model: CachedLM) -> None:
    """Raises: ModelError if this thread is inside a step of another run of the model, or if only some threads flush
    denormal numbers."""
    require_idle(model)
    require_one_flush_mode()


class RunGuard:
    """Keeps the numeric settings and the fingerprint that a run began with, and checks that they are unchanged.

    The run's hooks are on the model during the run's own steps only, so that several streams may use one model.
    """

    def __init__(self, model: CachedLM, fingerprint: Callable[[], Fingerprint]) -> None:
        self.model, self._fingerprint = model, fingerprint
        self._settings = numeric_settings()
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

    def require_unchanged(self) -> None:
        """Raises: FingerprintMismatch if numeric settings or weights have changed since the run began. All bytes of the
        weights are read again, since an edit through `weight.data` leaves no other trace."""
        what = "begin and end of one run, which must end before weights or settings are changed,"
        with hold_model(self.model):
            require_same(self.fingerprint, self._fingerprint(), what)
