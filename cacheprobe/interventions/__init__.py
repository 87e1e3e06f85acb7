"""Exports the functions that create interventions: changes of states, for `interventions=` of `cp.run`."""

from cacheprobe.interventions.base import Intervention
from cacheprobe.interventions.make import add, mean, replace, resample, swap, zero

__all__ = ["Intervention", "add", "mean", "replace", "resample", "swap", "zero"]
