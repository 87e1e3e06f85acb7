"""Computes attention of a few new tokens per request on a CPU, compiled by numba, batch-invariant.

One thread computes one key head of one request from beginning to end. Each token attends over the slots up to its own.
The result does not depend on the thread, on what other threads compute, or on the token's index in a window.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cacheprobe.ops.attention.decode_kernel import work_on_bfloat16, work_on_float32
from cacheprobe.ops.compiled.basics import run_on_threads

WORK = {torch.float32: work_on_float32, torch.bfloat16: work_on_bfloat16}
"""The compiled loops, by dtype."""

MOST_TOKENS = 64
"""Largest number of tokens per request in a float32 window. Torch's own attention is faster for longer passes."""

_LITTLE = 2**16
"""Up to this many elements of keys one thread is faster than two, because to wake a thread takes time."""


def serves(q: Tensor) -> bool:
    """Returns True if `decode_attention` can compute queries [b, h, t, d]: on a CPU, without gradients, for t up to 64
    in float32 or t = 1 in bfloat16.

    For more bfloat16 tokens, matrix instructions are several times faster.
    """
    is_trained = torch.is_grad_enabled() and q.requires_grad
    is_short = q.shape[2] == 1 or (q.dtype == torch.float32 and q.shape[2] <= MOST_TOKENS)
    return q.device.type == "cpu" and is_short and q.dtype in WORK and not is_trained


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, places: NDArray[np.int64], scale: float
) -> Tensor:
    """Returns attention outputs [b, h, t, dv] of queries [b, h, t, d], with an additive mask [b, 1 or h, t, s].
    Requests that are not in `places` give zeros.

    keys, values: [1, g, s, d] and [1, g, s, dv] of any one request.
    places: int64 [n, 5] for n requests: batch index, offset in elements from `keys` and from `values` to that request's
    own, number of slots to attend to, position of its first token.
    Raises: ValueError for tensors of different dtypes, a mask of another shape, keys or values whose last dimension is
    not contiguous, and a request that attends to no slot of its own; RuntimeError if the compiled loops ended early.
    Twin: ops.attention.cached.cached_attention, close: sums are ordered otherwise.
    """
    (batch, heads, width, depth), (_, groups, _, value_depth) = q.shape, values.shape
    _require_readable(q, keys, values, mask, places)
    q, mask = q.contiguous(), mask if mask.stride(-1) == 1 else mask.contiguous()
    out = q.new_zeros(batch, heads, width, value_depth)
    mask_of_head = mask.stride(1) if mask.shape[1] > 1 else 0
    call = np.array(
        (
            *(tensor.data_ptr() for tensor in (q, keys, values, mask, out)), places.ctypes.data, len(places),
            heads, groups, width, depth, value_depth, keys.stride(1), values.stride(1), keys.stride(2),
            values.stride(2), mask.stride(0), mask_of_head, mask.stride(2), np.float64(scale).view(np.int64), 0, 0,
        ),
        np.int64,
    )  # fmt: skip
    run_on_threads(WORK[q.dtype], call, int(places[:, 3].sum()) * groups * width * depth <= _LITTLE)
    if call[21] != len(places) * groups:  # compiled loops print an error and return
        raise RuntimeError(
            f"attention of {len(places)} requests ended after {call[21]} of {len(places) * groups} heads"
        )
    return out


def _require_readable(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, places: NDArray[np.int64]) -> None:
    """Checks the arguments of `decode_attention`: dtypes, mask shape, last strides and slot numbers. Raises: ValueError
    for a wrong one."""
    if {keys.dtype, values.dtype, mask.dtype} != {q.dtype}:
        raise ValueError(
            f"keys of {keys.dtype}, values of {values.dtype} and mask of {mask.dtype}, queries of {q.dtype}"
        )
    slots = int(places[:, 3].max(initial=0))  # column 3: number of slots, column 4: position of the first token
    shape = mask.shape
    if shape[0] != len(q) or shape[1] not in (1, q.shape[1]) or shape[2] != q.shape[2] or shape[3] < slots:
        raise ValueError(f"a mask of {tuple(shape)} for queries of {tuple(q.shape)} over {slots} slots")
    if (keys.stride(3) != 1 and keys.shape[3] > 1) or (values.stride(3) != 1 and values.shape[3] > 1):
        raise ValueError(f"keys and values of strides {keys.stride()} and {values.stride()}; the last must be 1")
    if len(places) and (places[:, 3] <= places[:, 4]).any():
        raise ValueError("a request attends to no slot of its own: slots must exceed the first token's position")
