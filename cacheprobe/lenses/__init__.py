"""Exports the lenses as `cp.lenses.NAME`. A lens turns a layer's state into logits over the vocabulary."""

from cacheprobe.lenses.base import Lens, LensError
from cacheprobe.lenses.jacobian import JacobianLens
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.lenses.thought import ThoughtLens
from cacheprobe.lenses.tuned import TunedLens

__all__ = ["JacobianLens", "Lens", "LensError", "LogitLens", "ThoughtLens", "TunedLens"]
