"""Lenses: plug-ins that turn a layer's state into a distribution over the vocabulary. One file each."""

from cacheprobe.lenses.logit import LogitLens

__all__ = ["LogitLens"]
