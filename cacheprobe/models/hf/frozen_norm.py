"""Linearises RMSNorm or LayerNorm by freezing its scale, for logit attribution.

A norm divides by a scale that depends on its whole input. If the scale of one input is kept fixed, the norm is linear,
so the norm of a sum is the sum of the norms of its terms.
"""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cacheprobe.models.base import ModelError

_LINEAR_TO = 1e-5
"""Largest accepted error, relative to the norm's largest output."""
_PROBE = 64.0
"""Large compared with any norm's epsilon, and exact in every dtype."""


class FrozenNorm:
    """Applies a norm whose scale is frozen at one input: a linear function of parts [n, m] -> [n, m], without the
    norm's bias.

    Weight, bias and centring are measured on a float64 copy of the module, so they do not depend on how a family
    implements its norm.
    Source: the linearised final norm of Elhage et al. 2021, "A mathematical framework for transformer circuits".
    Twin: tests.twins.attribution_slowly.frozen_slowly, close(1e-5).
    """

    def __init__(self, module: nn.Module, at: Float[Tensor, "m"]) -> None:
        """Measures the norm `module` and freezes its scale at the input `at` [m]. Raises: ModelError for a norm that is
        not linear at a fixed scale."""
        own = copy.deepcopy(module).double().cpu()
        at = at.double().cpu()
        with torch.inference_mode():
            signs = torch.ones_like(at)
            signs[1::2] = -1
            zero, flat, alternating, out = own(torch.stack([0 * at, signs.abs() * _PROBE, signs * _PROBE, at]))
            self.bias = zero
            # a norm that subtracts the mean maps equal numbers to its bias
            self.is_centred = bool((flat - zero).abs().max() < 1e-3 * (alternating - zero).abs().max())
            probe = self._centred(signs * _PROBE)
            self._weight = (alternating - zero) * probe.square().mean().sqrt() / probe
            scaled = self._centred(at) * self._weight
            # the scale that fits scaled / scale best to the output without bias, by least squares
            self.scale = float(scaled.dot(scaled) / scaled.dot(out - zero))
            error = float((scaled / self.scale - (out - zero)).abs().max() / (out - zero).abs().max())
        if not error <= _LINEAR_TO:
            raise ModelError(
                f"{type(module).__name__} is no norm that is linear at a fixed scale (off by {error:.1g} of its "
                "output), so a logit does not fall into parts behind it; read the states with a lens instead"
            )

    def __call__(self, parts: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        return self._centred(parts.double()) * self._weight / self.scale

    def _centred(self, parts: Tensor) -> Tensor:
        return parts - parts.mean(-1, keepdim=True) if self.is_centred else parts
