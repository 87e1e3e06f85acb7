"""Allocates the tensors of a cache. On a Linux CPU, large ones take memory only where something was written."""

import mmap
import sys

import torch
from torch import Tensor

_ALIGNED_SLOTS = 64
"""Each cache row occupies a multiple of this number of slots in memory. Every row and head then begins at a multiple of
64 bytes; the sums of some libraries depend on this alignment."""
_LEAST_MAPPED = 1 << 20
"""Bytes from which a tensor is mapped; smaller ones are not worth a mapping of their own."""


def is_mapped(device: torch.device | str) -> bool:
    """Returns True if large tensors of the device take memory only where something was written."""
    return sys.platform == "linux" and torch.device(device).type == "cpu"


def zero_slots(
    rows: int, heads: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Returns a zero tensor [rows, heads, capacity, width] whose rows and heads begin at multiples of 64 bytes."""
    allocated = -(-capacity // _ALIGNED_SLOTS) * _ALIGNED_SLOTS
    return zeros((rows, heads, allocated, width), dtype, device)[:, :, :capacity]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns a zero tensor. Twin: torch.zeros, the same values; torch writes all of them at once."""
    count = 1
    for size in shape:
        count *= size
    num_bytes = count * dtype.itemsize
    if not is_mapped(device) or num_bytes < _LEAST_MAPPED:
        return torch.zeros(shape, dtype=dtype, device=device)
    # private: a forked process must not see what this one writes; without huge pages, which would fill unused slots
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
