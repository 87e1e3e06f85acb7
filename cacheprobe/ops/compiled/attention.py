"""Computes attention of a few new tokens per request on a CPU, and writes keys and values, compiled by numba. The
attention is batch-invariant.

One thread computes one key head of one request from beginning to end. Each token attends over the slots up to its own.
The result does not depend on the thread, on what other threads compute, or on the token's index in a window.
"""

from functools import cache

import numpy as np
import torch
from numba.core.ccallback import CFunc
from numpy.typing import NDArray
from torch import Tensor

from cacheprobe.ops.compiled.attention_loops import attention_work
from cacheprobe.ops.compiled.basics import run_on_threads
from cacheprobe.ops.compiled.lanes import BFLOAT16, FLOAT16, FLOAT32, FORMATS

MOST_TOKENS = {FLOAT32: 64, BFLOAT16: 16, FLOAT16: 16}
"""Largest number of tokens per request, by format. Torch's own attention is faster for longer passes: in 16 bits, some
processors multiply matrices in one instruction."""

_LITTLE = 2**16
"""Up to this many elements of keys one thread is faster than two, because to wake a thread takes time."""


def serves(q: Tensor) -> bool:
    """Returns True if `decode_attention` can compute queries [b, h, t, d]: on a CPU, without gradients, for t up to
    MOST_TOKENS."""
    is_trained = torch.is_grad_enabled() and q.requires_grad
    return serves_tokens_of(q) and q.shape[2] <= MOST_TOKENS[FORMATS[q.dtype]] and not is_trained


def serves_tokens_of(tensor: Tensor) -> bool:
    """Returns True if `decode_attention` can compute one token for each request, in the dtype of `tensor` and on its
    device."""
    return tensor.device.type == "cpu" and tensor.dtype in FORMATS


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
    q, mask = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, mask))
    call, out = attention_call(q, keys, values, mask, places, scale)
    groups, num_elements = values.shape[1], int(places[:, 3].sum()) * q[0, 0].numel() * values.shape[1]
    run_on_threads(_loops(FORMATS[q.dtype]), call, num_elements <= _LITTLE)
    if call[21] != len(places) * groups:  # compiled loops print an error and return
        raise RuntimeError(
            f"attention of {len(places)} requests ended after {call[21]} of {len(places) * groups} heads"
        )
    return out


@cache
def _loops(format: int) -> CFunc:
    return attention_work(format)


def attention_call(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, places: NDArray[np.int64], scale: float
) -> tuple[NDArray[np.int64], Tensor]:
    """Returns the numbers that describe an attention call to the loops, and its result [b, h, t, dv], which holds no
    values yet. Arguments and errors are those of `decode_attention`; the last dimension of `q` and `mask` must be
    contiguous. The arguments must live until the loops have run.
    """
    (batch, heads, width, depth), (_, groups, _, value_depth) = q.shape, values.shape
    _require_readable(q, keys, values, mask, places)
    make = q.new_empty if len(places) == batch else q.new_zeros
    out = make(batch, width, heads, value_depth).transpose(1, 2)
    mask_of_head = mask.stride(1) if mask.shape[1] > 1 else 0
    call = np.array(
        (
            *(tensor.data_ptr() for tensor in (q, keys, values, mask, out)), places.ctypes.data, len(places),
            heads, groups, width, depth, value_depth, keys.stride(1), values.stride(1), keys.stride(2),
            values.stride(2), mask.stride(0), mask_of_head, mask.stride(2), np.float64(scale).view(np.int64), 0, 0,
            q.stride(1), q.stride(2), out.stride(1), out.stride(2), q.stride(0),
        ),
        np.int64,
    )  # fmt: skip
    return call, out


def _require_readable(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, places: NDArray[np.int64]) -> None:
    """Checks the arguments of `decode_attention`: dtypes, mask shape, last strides and slot numbers. Raises: ValueError
    for a wrong one."""
    if {keys.dtype, values.dtype, mask.dtype} != {q.dtype}:
        raise ValueError(
            f"keys of {keys.dtype}, values of {values.dtype} and mask of {mask.dtype}, queries of {q.dtype}"
        )
    shape = mask.shape
    if shape[0] != len(q) or shape[1] not in (1, q.shape[1]) or shape[2] != q.shape[2]:
        raise ValueError(f"a mask of {tuple(shape)} for queries of {tuple(q.shape)}")
    require_slots(places, shape[3])
    if (keys.stride(3) != 1 and keys.shape[3] > 1) or (values.stride(3) != 1 and values.shape[3] > 1):
        raise ValueError(f"keys and values of strides {keys.stride()} and {values.stride()}; the last must be 1")


def require_slots(places: NDArray[np.int64], num_slots: int) -> None:
    """Checks the slots of each request in `places` (see `decode_attention`). Raises: ValueError for a request that
    attends to more slots than the mask's `num_slots`, or to none of its own."""
    slots = int(places[:, 3].max(initial=0))  # column 3: number of slots, column 4: position of the first token
    if slots > num_slots:
        raise ValueError(f"a mask of {num_slots} slots for requests that attend to {slots}")
    if (places[:, 3] <= places[:, 4]).any():
        raise ValueError("a request attends to no slot of its own: slots must exceed the first token's position")


def store_call(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor, starts: Tensor) -> NDArray[np.int64]:
    """Returns the numbers that describe a cache write to the loops: as `ops.cache_rows.store_kv`, with int64 rows and
    starts. k, v [b, g, t, d] lie in memory as [b, t, g, d]. The arguments must live until the loops have run.

    Raises: ValueError for new keys or values of another layout or dtype, and for rows or starts of another dtype.
    """
    for new, held in ((k, keys), (v, values)):
        if not new.transpose(1, 2).is_contiguous() or new.dtype != held.dtype or held.stride(3) != 1:
            raise ValueError(f"a cache of {held.dtype} and new {new.dtype} of strides {new.stride()} are not written")
    if {rows.dtype, starts.dtype} != {torch.int64}:
        raise ValueError(f"rows of {rows.dtype} and starts of {starts.dtype}; both must be int64")
    steps = zip(keys.stride()[:3], values.stride()[:3], strict=True)
    return np.array(
        (
            *(tensor.data_ptr() for tensor in (k, v, keys, values, rows, starts)), k.shape[2], k.shape[1], len(k),
            k.shape[3], v.shape[3], *(step for pair in steps for step in pair),
        ),
        np.int64,
    )  # fmt: skip
