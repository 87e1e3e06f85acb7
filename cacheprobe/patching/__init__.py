"""Computes patching grids: puts states of one run into another, at each layer and position, and measures how the
prediction of two answer tokens changes."""

from cacheprobe.patching.activation import activation
from cacheprobe.patching.grid import PatchingGrid
from cacheprobe.patching.prefix import prefix
from cacheprobe.patching.tracing import causal_tracing

__all__ = ["PatchingGrid", "activation", "causal_tracing", "prefix"]
