"""Interventions: change states at absolute positions; for `interventions=` of `run`, `reference` and `stream`."""

from cacheprobe.interventions.base import Intervention
from cacheprobe.interventions.make import add, mean, replace, resample, swap, zero

__all__ = ["Intervention", "add", "mean", "replace", "resample", "swap", "zero"]
