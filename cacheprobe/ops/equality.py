"""Two kinds of "equal": bitwise and close. Tokens are compared with ==."""

import torch
from torch import Tensor

_AS_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(a: Tensor) -> Tensor:
    """Returns the tensor's bits as integers of the same width."""
    return a.contiguous().view(_AS_INT[a.element_size()])


def bitwise(a: Tensor, b: Tensor) -> bool:
    """Returns whether shape, dtype and bits are the same; a NaN equals the same NaN, and +0 differs from -0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def ordered_bits(a: Tensor) -> Tensor:
    """Returns int64 keys in the order of the numbers: neighbouring floats differ by one, and both zeros give 0."""
    as_int = bits(a).long()
    lowest = -(1 << (8 * a.element_size() - 1))
    return torch.where(as_int < 0, lowest - as_int, as_int)


def close(a: Tensor, b: Tensor, rtol: float, *, because: str) -> bool:
    """Returns whether |a - b| <= rtol * max(1, largest |b|) everywhere; `because` is the reason for not being
    bitwise."""
    if not because:
        raise ValueError("close() needs the reason why the two are not bitwise equal")
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    return bool(((a - b).abs() <= rtol * scale).all())
