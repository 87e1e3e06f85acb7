"""Compares tensors in two senses of "equal": bitwise, and close. Tokens are compared with ==."""

import torch
from torch import Tensor

_AS_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(a: Tensor) -> Tensor:
    """Returns the bits of a tensor's numbers as integers of the same width, in the same shape."""
    return a.contiguous().view(_AS_INT[a.element_size()])


def bitwise(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have the same shape, dtype and bits. A NaN equals the same NaN, and +0 differs from
    -0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def ordered_bits(a: Tensor) -> Tensor:
    """Returns int64 keys that sort like the numbers of a float tensor: neighbouring floats have keys that differ by
    one; +0 and -0 have key 0."""
    as_int = bits(a).long()
    lowest = -(1 << (8 * a.element_size() - 1))
    return torch.where(as_int < 0, lowest - as_int, as_int)


def close(a: Tensor, b: Tensor, rtol: float, *, because: str) -> bool:
    """Returns True if two tensors have the same shape and satisfy |a - b| <= rtol * max(1, largest |b|) everywhere.

    because: the reason why they are not bitwise equal. Raises: ValueError for an empty reason.
    """
    if not because:
        raise ValueError("close() needs the reason why the two are not bitwise equal")
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    return bool(((a - b).abs() <= rtol * scale).all())
