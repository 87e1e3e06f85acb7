"""Computes patching grids: puts states of one run into another, at each layer and position, and measures how the
prediction of two answer tokens changes."""

from cacheprobe.edits.patching.attribution import attribution
from cacheprobe.edits.patching.grid import PatchingGrid
from cacheprobe.edits.patching.pairs import activation, prefix
from cacheprobe.edits.patching.tracing import causal_tracing

__all__ = ["PatchingGrid", "activation", "attribution", "causal_tracing", "prefix"]


def __dir__() -> list[str]:
    """Returns the public names, for dir() and completion."""
    return sorted(__all__)
