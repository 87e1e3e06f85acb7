"""Lenses: plug-ins that turn a layer's state into a distribution over the vocabulary. One file each."""

from cacheprobe.lenses.base import LensError
from cacheprobe.lenses.jacobian import JacobianLens
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.lenses.thought import ThoughtLens
from cacheprobe.lenses.tuned import TunedLens

__all__ = ["JacobianLens", "LensError", "LogitLens", "ThoughtLens", "TunedLens"]
