"""Exports the functions that create interventions: changes of states, for `interventions=` of `cp.run`."""

from cacheprobe.edits.interventions.base import Intervention, StateContext
from cacheprobe.edits.interventions.features import FeatureChange, ablate_expert, ablate_feature, steer_feature
from cacheprobe.edits.interventions.functions import ablate, clamp, hook, project
from cacheprobe.edits.interventions.make import add, mean, read_steering, replace, resample, steer, swap, zero
from cacheprobe.edits.interventions.rejected import on_rejected

__all__ = [
    "FeatureChange",
    "Intervention",
    "StateContext",
    "ablate",
    "ablate_expert",
    "ablate_feature",
    "add",
    "clamp",
    "hook",
    "mean",
    "on_rejected",
    "project",
    "read_steering",
    "replace",
    "resample",
    "steer",
    "steer_feature",
    "swap",
    "zero",
]


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(__all__)
