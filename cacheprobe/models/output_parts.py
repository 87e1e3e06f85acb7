"""What stands between a state and the logits, and between heads and the stream, part by part."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn


class OutputParts(NamedTuple):
    """From the last residual stream to the logits."""

    norm: nn.Module
    weight: Tensor
    """[v, m]"""
    bias: Tensor | None
    """[v]"""
    finish: Callable[[Tensor], Tensor]
    """What the architecture still does to logits [n, v]: a soft cap, a scale, or nothing."""


class HeadWriter(NamedTuple):
    """From the heads of one layer to T."""

    weight: Tensor
    """[h, d, m]"""
    bias: Tensor | None
    """[m]"""
    norm: nn.Module | None
    """Behind the projection, in post-norm models."""


def head_weights(module: Any, heads: int) -> Tensor:
    """[h, d, m] of a projection that reads all heads side by side; transformers' Conv1D is the other way round."""
    weight = module.weight.detach()
    rows = weight if type(module).__name__ == "Conv1D" else weight.T
    return rows.unflatten(0, (heads, -1))
