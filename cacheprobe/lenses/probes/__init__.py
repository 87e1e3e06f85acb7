"""Fits probes: linear classifiers on captured states, compared with baselines that do not use the states."""

from typing import TYPE_CHECKING

from cacheprobe.core.values import no_attribute
from cacheprobe.lenses.probes.examples import ProbeError, labelled, require_above_chance
from cacheprobe.lenses.probes.linear import ProbeResult, Regression, fit, regress
from cacheprobe.lenses.probes.rollback_prediction import RollbackPrediction, drafted, rollback_prediction
from cacheprobe.lenses.probes.untrained import untrained

__all__ = [
    "ProbeError",
    "ProbeResult",
    "Regression",
    "RollbackPrediction",
    "drafted",
    "fit",
    "labelled",
    "regress",
    "require_above_chance",
    "rollback_prediction",
    "untrained",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        raise no_attribute("module 'cacheprobe.lenses.probes'", name, __all__)


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(__all__)
