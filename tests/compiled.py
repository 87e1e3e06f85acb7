"""Puts a model on the compiled loops of float32 arithmetic, whatever this machine would choose."""

from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.ops.compiled.lanes import FLOATS
from cacheprobe.ops.compiled.operations import CompiledOperations, CompiledProduct, CompiledReadout


def on_loops(model: PlainLM) -> PlainLM:
    """Returns the model, whose products and readings run in the loops from now on."""
    product = CompiledProduct(FLOATS)
    model.use_operations(CompiledOperations(product, CompiledReadout(product)))
    return model
