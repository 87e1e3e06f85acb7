"""Computes patching grids: puts states of one run into another, at each layer and position, and measures how the
prediction of two answer tokens changes."""

from typing import TYPE_CHECKING

from cacheprobe.core.values import no_attribute
from cacheprobe.edits.patching.attribution import attribution
from cacheprobe.edits.patching.grid import PatchingGrid
from cacheprobe.edits.patching.pairs import activation, prefix
from cacheprobe.edits.patching.tracing import causal_tracing

__all__ = ["PatchingGrid", "activation", "attribution", "causal_tracing", "prefix"]

if not TYPE_CHECKING:  # a checker that saw it would let every misspelt name pass

    def __getattr__(name: str) -> object:
        raise no_attribute("module 'cacheprobe.edits.patching'", name, __all__)
