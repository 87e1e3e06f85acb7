"""Computes a model's RMSNorm and linear projection with the same bits as its modules."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear


def rms_norm(values: Float[Tensor, "n m"], weight: Float[Tensor, "m"], eps: float) -> Float[Tensor, "n m"]:
    """Returns values / sqrt(mean(values^2) + eps) * weight, for each vector of `values` [n, m].

    The mean square is computed in float32 (float64 for float64 input), the product with the weight in the dtype of
    `values`.
    Source: Zhang & Sennrich 2019 (arXiv 1910.07467), equation 4.
    Twin: the rms_norm of models.fast.functional, which is that of the modules, bitwise (tests.ops.test_plain_ops).
    """
    wide = values if values.dtype == torch.float64 else values.float()
    scaled = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return weight * scaled.to(values.dtype)


def project(
    values: Float[Tensor, "n i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None
) -> Float[Tensor, "n o"]:
    """Returns values weight^T + bias, as a tensor [n, o] in the dtype of `values`."""
    return linear(values, weight, bias)
