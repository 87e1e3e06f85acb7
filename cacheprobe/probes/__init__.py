"""Fits probes: linear classifiers on captured states, compared with baselines that do not use the states."""

from typing import TYPE_CHECKING

from cacheprobe.core.values import no_attribute
from cacheprobe.probes.checks import ProbeError, require_above_chance
from cacheprobe.probes.drafts import drafted
from cacheprobe.probes.linear import ProbeResult, fit
from cacheprobe.probes.places import labelled
from cacheprobe.probes.regression import Regression, regress
from cacheprobe.probes.rollback_prediction import RollbackPrediction, rollback_prediction
from cacheprobe.probes.untrained import untrained

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
        raise no_attribute("module 'cacheprobe.probes'", name, __all__)
