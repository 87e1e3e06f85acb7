"""Defines OutputParts (the steps from residual states to logits) and HeadWriter (from attention heads to the residual
stream)."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from cacheprobe.core.live import LiveModule


class OutputParts(NamedTuple):
    """Holds the steps from the last residual stream to the logits: final norm, unembedding, bias, last function."""

    norm: nn.Module
    weight: Tensor
    """[v, m]"""
    bias: Tensor | None
    """[v]"""
    finish: Callable[[Tensor], Tensor]
    """Function applied to the logits [n, v] last: the architecture's soft cap or scale, or no change."""


class HeadWriter(NamedTuple):
    """Holds the steps from the heads of one layer to the attention output (site T): projection by head, bias, norm."""

    weight: Tensor
    """[h, d, m]"""
    bias: Tensor | None
    """[m]"""
    norm: nn.Module | None
    """Norm after the projection, in post-norm models."""


def head_weights(module: LiveModule, heads: int) -> Tensor:
    """Returns the weights [h, d, m] of an attention output projection, split by head. module: the projection, which
    reads all `heads` heads side by side."""
    return output_rows(module).T.unflatten(0, (heads, -1))


def output_rows(module: LiveModule) -> Tensor:
    """Returns the weight of a linear module as [outputs, inputs]. For GPT-2's Conv1D, which stores [inputs, outputs],
    returns the transpose."""
    weight = module.weight.detach()
    return weight.T if type(module).__name__ == "Conv1D" else weight
