"""Exports the functions that create interventions: changes of states, for `interventions=` of `cp.run`."""

from cacheprobe.interventions.base import Intervention, StateContext
from cacheprobe.interventions.directions import ablate, clamp, project, steer
from cacheprobe.interventions.experts import ablate_expert
from cacheprobe.interventions.features import FeatureChange, ablate_feature, steer_feature
from cacheprobe.interventions.functions import function
from cacheprobe.interventions.make import add, mean, replace, resample, swap, zero
from cacheprobe.interventions.steering_files import read_steering

__all__ = [
    "FeatureChange",
    "Intervention",
    "StateContext",
    "ablate",
    "ablate_expert",
    "ablate_feature",
    "add",
    "clamp",
    "function",
    "mean",
    "project",
    "read_steering",
    "replace",
    "resample",
    "steer",
    "steer_feature",
    "swap",
    "zero",
]
