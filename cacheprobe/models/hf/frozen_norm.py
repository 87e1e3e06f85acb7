"""A norm that a sum can be taken through.

It divides by a scale that depends on its whole input. With the scale held at one row's it is linear, and what it makes
of a sum is the sum of what it makes of the terms.
"""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cacheprobe.models.base import ModelError

_LINEAR_TO = 1e-5
_PROBE = 64.0
"""Large beside any norm's epsilon, and a number in every dtype."""


class FrozenNorm:
    """A norm with its scale held at one input's: parts [n, m] -> [n, m], linear, its bias left out.

    Weight, bias and centring are found by what the module does, on a copy of it in float64, so that it does not matter
    how a family writes them.
    Source: the linearised final norm of Elhage et al. 2021, "A mathematical framework for transformer circuits".
    Twin: tests.attribution_slowly.frozen_slowly, close(1e-5).
    """

    def __init__(self, module: nn.Module, at: Float[Tensor, "m"]) -> None:
        """at: the input whose scale is held. Raises: ModelError for a norm that is not linear at a fixed scale."""
        own = copy.deepcopy(module).double()
        at = at.double()
        with torch.inference_mode():
            signs = torch.ones_like(at)
            signs[1::2] = -1
            zero, flat, alternating, out = own(torch.stack([0 * at, signs.abs() * _PROBE, signs * _PROBE, at]))
            self.bias = zero
            self.is_centred = bool((flat - zero).abs().max() < 1e-3 * (alternating - zero).abs().max())
            probe = self._centred(signs * _PROBE)
            self._weight = (alternating - zero) * probe.square().mean().sqrt() / probe
            scaled = self._centred(at) * self._weight
            self.scale = float(scaled.dot(scaled) / scaled.dot(out - zero))
            far = float((scaled / self.scale - (out - zero)).abs().max() / (out - zero).abs().max())
        if not far <= _LINEAR_TO:
            raise ModelError(
                f"{type(module).__name__} is no norm that is linear at a fixed scale (off by {far:.1g} of its output), "
                "so a logit does not fall into parts behind it; read the states with a lens instead"
            )

    def __call__(self, parts: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        return self._centred(parts.double()) * self._weight / self.scale

    def _centred(self, parts: Tensor) -> Tensor:
        return parts - parts.mean(-1, keepdim=True) if self.is_centred else parts
