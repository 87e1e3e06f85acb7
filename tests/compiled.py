"""Puts a model on the compiled loops of float32 arithmetic, whatever this machine would choose."""

from cacheprobe.models.hf.bridge import BridgeLM
from cacheprobe.ops.compiled.lanes import FLOATS
from cacheprobe.ops.compiled.operations import CompiledOperations, CompiledProduct, CompiledReadout


def on_loops(model: BridgeLM) -> BridgeLM:
    """Returns the model, whose products and readings run in the loops from now on."""
    product = CompiledProduct(FLOATS)
    model.operations = CompiledOperations(product, CompiledReadout(product))
    return model
