"""Computes the schedule fingerprint: everything that the bits of a deterministic request depend on, besides its prompt
and settings."""

from collections.abc import Sequence

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Request, fingerprint_differences
from cacheprobe.interventions.base import Intervention
from cacheprobe.interventions.editor import changes_fingerprint
from cacheprobe.models.base import CachedLM

Fingerprint = dict[str, str | int | float]


class FingerprintMismatch(ValueError):
    """Says that two runs have different schedules, so that their bits cannot be compared."""


def schedule_fingerprint(
    model: CachedLM,
    config: EngineConfig,
    lens_tile: int,
    interventions: Sequence[Intervention] = (),
    requests: Sequence[Request] = (),
) -> Fingerprint:
    """Returns the schedule fingerprint: model, platform, fixed shapes, interventions and cache snapshots by request.
    `max_batch`, the drafter and the traffic are left out, because results must not depend on them."""
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
    begun = [f"request {r.request_id}: {r.cached.digest()}" for r in requests if r.cached is not None]
    cached = {"cached": "; ".join(begun)} if begun else {}
    return {**facts, **shapes, **changes_fingerprint(interventions, facts), **cached}


def require_same(a: Fingerprint, b: Fingerprint, what: str) -> None:
    """Raises: FingerprintMismatch with the fields that differ. A model is its weights, wherever it was loaded from."""
    differing = [f"{key}: {x!r} against {y!r}" for key, x, y in fingerprint_differences(a, b)]
    if differing:
        raise FingerprintMismatch(f"{what} ran under different schedules; {'; '.join(differing)}")
