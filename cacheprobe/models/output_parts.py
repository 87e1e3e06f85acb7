"""Splits the way from a state to the logits, and from attention heads to the residual stream, into its parts."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from cacheprobe.core.live import LiveModule


class OutputParts(NamedTuple):
    """The parts from the last residual stream to the logits."""

    norm: nn.Module
    weight: Tensor
    """[v, m]"""
    bias: Tensor | None
    """[v]"""
    finish: Callable[[Tensor], Tensor]
    """Applies what the architecture still does to logits [n, v]: a soft cap, a scale, or no change."""


class HeadWriter(NamedTuple):
    """The parts from the heads of one layer to the attention output (site T)."""

    weight: Tensor
    """[h, d, m]"""
    bias: Tensor | None
    """[m]"""
    norm: nn.Module | None
    """Norm after the projection, in post-norm models."""


def head_weights(module: LiveModule, heads: int) -> Tensor:
    """Returns weights [h, d, m] of a projection that reads all heads side by side."""
    return output_rows(module).T.unflatten(0, (heads, -1))


def output_rows(module: LiveModule) -> Tensor:
    """Returns a linear module's weight with one row for each output; Conv1D stores the transpose."""
    weight = module.weight.detach()
    return weight.T if type(module).__name__ == "Conv1D" else weight
