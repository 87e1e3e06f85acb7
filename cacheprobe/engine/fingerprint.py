"""Computes the schedule fingerprint of a run: all that a deterministic request's bits depend on, besides its prompt and
sampling settings (model, platform, pass shapes, interventions, cached keys and values)."""

from collections.abc import Sequence

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Request, fingerprint_differences
from cacheprobe.interventions.base import Intervention
from cacheprobe.interventions.editor import intervention_entries
from cacheprobe.models.base import CachedLM

Fingerprint = dict[str, str | int | float]


class FingerprintMismatch(ValueError):
    """Raised if two runs have different schedule fingerprints, so that their bits cannot be compared."""


def schedule_fingerprint(
    model: CachedLM,
    config: EngineConfig,
    lens_tile: int,
    interventions: Sequence[Intervention] = (),
    requests: Sequence[Request] = (),
) -> Fingerprint:
    """Returns the schedule fingerprint of a run as a dict: model, platform, shapes, interventions, cache snapshots.

    lens_tile: number of vectors that a lens reads in one pass. `max_batch`, the drafter and the prompts are left out.
    """
    shapes = {
        "window": config.window,
        "group": config.group,
        "capacity": config.capacity,
        "prefill_chunk": config.prefill_chunk,
        "prefill_group": config.prefill_group,
        "lens_tile": lens_tile,
        **({} if config.pad_prefill else {"pad_prefill": False}),
    }
    facts = model.fingerprint()
    snapshots = [f"request {r.request_id}: {r.cached.digest()}" for r in requests if r.cached is not None]
    cached = {"cached": "; ".join(snapshots)} if snapshots else {}
    return {**facts, **shapes, **intervention_entries(interventions, facts), **cached}


def require_same(a: Fingerprint, b: Fingerprint, what: str) -> None:
    """Raises: FingerprintMismatch if two schedule fingerprints differ; the message names the differing fields.

    what: the two things compared, for the message. The names of model and adapter may differ, the weights may not.
    """
    differing = [f"{key}: {x!r} against {y!r}" for key, x, y in fingerprint_differences(a, b)]
    if differing:
        raise FingerprintMismatch(f"{what} ran under different schedules; {'; '.join(differing)}")
