"""Patching grids: what of one run, put into another at a layer and position, brings its answer over."""

from cacheprobe.patching.activation import activation
from cacheprobe.patching.grid import Grid
from cacheprobe.patching.prefix import prefix
from cacheprobe.patching.tracing import causal_tracing

__all__ = ["Grid", "activation", "causal_tracing", "prefix"]
