"""Defines the operations of which a forward consists, so that another implementation can replace torch's."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.hf.attention import attend_over_cache
from cacheprobe.models.hf.rms_norms import Norm

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Function (values, weight, bias) -> values weight^T + bias."""

Rotation = tuple[Tensor, Tensor]
"""(cosines, sines) by which queries and keys are rotated at their positions, [b, t, 1, d] each; the first half of each
vector of sines is negated."""


Listeners = Mapping[tuple[str, int], Sequence[Callable[[Tensor], object]]]
"""Functions to call with an activation, keyed by (site, layer); sites are pre, S, T and C."""

Masks = Tensor | Mapping[str, Tensor]
"""Additive mask [b, 1, t, s], or one for each kind of layer."""


class Affine(NamedTuple):
    """Holds the tensors of a linear layer."""

    weight: Tensor
    bias: Tensor | None


class PassInputs(NamedTuple):
    """Holds what the blocks of a model read in one forward."""

    stream: Tensor
    """Residual stream [b, t, m] before the first block."""
    cache: StagedCache
    """Where the blocks write and read keys and values, with staged positions."""
    rotation: Rotation | None
    masks: Masks
    listeners: Listeners
    num_layers: int | None
    """How many blocks to compute; None for all."""

    def mask(self, kind: str) -> Tensor:
        """Returns the mask of a kind of layer."""
        return self.masks if isinstance(self.masks, Tensor) else self.masks[kind]


@runtime_checkable
class BlockForward(Protocol):
    """Is the part of a forward that computes the blocks (a Protocol)."""

    def blocks(self, operations: "Operations", inputs: PassInputs) -> Tensor:
        """Returns the residual stream [b, t, m] after the blocks. Writes keys and values to the cache, and passes
        activations on to the listeners."""
        ...


class Operations:
    """Computes the operations of a forward by torch, each at once. `product` may be replaced.

    Twin: the model's own modules, bitwise, if the modules compute with the same product.
    """

    def __init__(self, product: Product = linear) -> None:
        self.product = product

    def begin(self) -> None:
        """Starts a forward. Here nothing is kept from forward to forward."""

    def run_blocks(self, model: BlockForward, inputs: PassInputs) -> Tensor:
        """Returns the residual stream [b, t, m] after the blocks of a model."""
        return model.blocks(self, inputs)

    def products(self, values: Float[Tensor, "b t i"], layers: Sequence[Affine]) -> list[Tensor]:
        """Returns the outputs [b, t, o] of linear layers that have the same input."""
        return [self.product(values, *layer) for layer in layers]

    def norm(self, values: Tensor, norm: Norm) -> Tensor:
        """Returns the RMSNorm of `values` [..., m], in the dtype of `values`."""
        wide = values if values.dtype == torch.float64 else values.float()
        scale = wide.pow(2).mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
        scaled = wide.mul_(scale) if wide is not values else wide * scale
        return norm.weight * scaled.to(values.dtype)

    def rotated(
        self, q: Float[Tensor, "b t h d"], k: Float[Tensor, "b t g d"], rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Returns queries [b, t, h, d] and keys [b, t, g, d] after the rotary embedding."""
        cos, sin = rotation
        both = torch.cat((q, k), 2)
        first, second = both.chunk(2, -1)
        rotated = (both * cos).add_(torch.cat((second, first), -1).mul_(sin))
        rotated_q, rotated_k = rotated.split((q.shape[2], k.shape[2]), 2)
        return rotated_q, rotated_k

    def attended(
        self, cache: StagedCache, layer: int, heads: Sequence[Tensor], mask: Tensor, scale: float
    ) -> Float[Tensor, "b t w"]:
        """Stores keys and values at the positions of `cache`, and returns the attention outputs [b, t, h * d].
        heads: new queries [b, t, h, d], keys and values [b, t, g, d]."""
        q, k, v = (part.transpose(1, 2) for part in heads)
        return attend_over_cache(cache, layer, q, k, v, mask, scale)

    def gated(self, gate: Tensor, up: Tensor, activation: LiveModule) -> Tensor:
        """Returns activation(gate) * up, [b, t, o]."""
        return activation(gate) * up

    def added(self, stream: Tensor, value: Tensor) -> Tensor:
        """Returns stream + value, [b, t, m]."""
        return stream + value

    def pass_on(self, value: Tensor, functions: Sequence[Callable[[Tensor], object]]) -> None:
        """Calls functions with a result, as soon as it is computed. The functions must not change the result."""
        for function in functions:
            function(value)

    def finish(self) -> None:
        """Computes what is not computed yet, and makes the calls of `pass_on`. Here each operation is computed at
        once."""
