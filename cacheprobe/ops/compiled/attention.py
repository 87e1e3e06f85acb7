"""Computes attention of a few new tokens per request on a CPU, and writes keys and values, compiled by numba. The
attention is batch-invariant.

One thread computes one key head of one request from beginning to end. Each token attends over the slots up to its own.
The result does not depend on the thread, on what other threads compute, or on the token's index in a window. A sum over
n float32 numbers always has the same order.

Indices are cast to unsigned numbers: numba would otherwise let negative indices count from the end, which makes loops
slow.
"""

from functools import cache
from typing import no_type_check

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from numba.core.ccallback import CFunc
from numpy.typing import NDArray
from torch import Tensor

from cacheprobe.ops.compiled.basics import (
    STORED,
    exponential,
    fetch_and_increment,
    fold_sum,
    largest,
    multiply_add,
    narrowed,
    pointer,
    run_on_threads,
    soft_capped,
    widened,
    work,
)
from cacheprobe.ops.compiled.lanes import BFLOAT16, FLOAT16, FLOAT32, FLOATS, FORMATS, LANES, OUTPUTS
from cacheprobe.ops.compiled.loops import multiply

NUMBERS = 28
"""How many whole numbers describe an attention call; `attention.attention_call` writes them."""

STORE_NUMBERS = 23
"""How many describe a cache write; `attention.store_call` writes them."""


@njit
@no_type_check
def _softmax(scores, at, count, scratch) -> None:
    """Replaces the numbers [at, at + count) by their softmax. scratch: room for `count` numbers."""
    best = largest(scores, at, count)
    for j in range(count):
        weight = exponential(np.float32(scores[np.uintp(at + j)] - best))
        scores[np.uintp(at + j)] = weight
        scratch[np.uintp(j)] = weight
    total = fold_sum(scratch, count)
    for j in range(count):
        scores[np.uintp(at + j)] /= total


@njit
@no_type_check
def _widen(stored, at, wide, to, count, scale) -> None:
    """Writes `count` stored numbers, times `scale`, into the float32 array `wide` from element `to` on."""
    for i in range(count):
        wide[np.uintp(to + i)] = widened(stored[np.uintp(at + i)]) * scale


@njit
@no_type_check
def _add_products(weights, at, rows, step, sums, counts) -> None:
    """Adds weights[at + j] * row j to the first counts[1] numbers of `sums`, for j = 0 to counts[0] - 1. step: elements
    from one row to the next."""
    (num_rows, count), j = counts, 0
    while j + 4 <= num_rows:
        a, b, c, d = weights[at + j], weights[at + j + 1], weights[at + j + 2], weights[at + j + 3]
        first = j * step
        for i in range(count):
            total = multiply_add(a, rows[np.uintp(first + i)], sums[np.uintp(i)])
            total = multiply_add(b, rows[np.uintp(first + step + i)], total)
            total = multiply_add(c, rows[np.uintp(first + 2 * step + i)], total)
            sums[np.uintp(i)] = multiply_add(d, rows[np.uintp(first + 3 * step + i)], total)
        j += 4
    while j < num_rows:
        for i in range(count):
            sums[np.uintp(i)] = multiply_add(weights[at + j], rows[np.uintp(j * step + i)], sums[np.uintp(i)])
        j += 1


@njit
@no_type_check
def _attend(arrays, at, steps, by_token, sizes, scale, cap) -> None:
    """Writes the attention outputs of tokens at consecutive positions, for one key head and the query heads that share
    it, to `out`. arrays: q, keys, values, mask, out. at: first element in each of the five. steps: from one slot or
    head to the next; by_token: from one token to the next.  cap: of the scores; 0 for none."""
    (q, keys, values, mask, out), (of_q, of_key, of_value, of_mask, of_out) = arrays, at
    (q_step, key_step, value_step, mask_step, out_step), (q_next, mask_next, out_next) = steps, by_token
    repeats, width, depth, value_depth, slots, start = sizes
    padded, one = (depth + LANES - 1) // LANES * LANES, np.float32(1.0)
    query, wide = np.zeros(repeats * width * padded, np.float32), np.zeros(slots * padded, np.float32)
    wide_values, scores = np.empty(slots * value_depth, np.float32), np.empty(repeats * width * slots, np.float32)
    sums, scratch = np.empty(value_depth, np.float32), np.empty(slots, np.float32)
    nothing, zeros = np.empty(0, np.float32), np.zeros(OUTPUTS, np.float32)
    for r in range(repeats):
        for t in range(width):
            _widen(q, of_q + r * q_step + t * q_next, query, (r * width + t) * padded, depth, scale)
    for j in range(slots):
        _widen(keys, of_key + j * key_step, wide, j * padded, depth, one)
        _widen(values, of_value + j * value_step, wide_values, j * value_depth, value_depth, one)
    multiply(
        FLOATS, FLOAT32, (nothing, nothing), (repeats * width, slots, padded),
        (np.int64(query.ctypes.data), 4 * padded), (np.int64(wide.ctypes.data), 4 * padded),
        (np.int64(zeros.ctypes.data), 0), (np.int64(scores.ctypes.data), 4 * slots),
    )  # fmt: skip
    scratch[0], sums[0] = query[0] + wide[0], zeros[0]  # until here the three arrays are kept
    if cap > np.float32(0.0):
        for i in range(repeats * width * slots):
            scores[np.uintp(i)] = soft_capped(scores[np.uintp(i)], cap)
    for r in range(repeats):
        for t in range(width):
            first, count = (r * width + t) * slots, min(slots, start + t + 1)
            for j in range(count):
                scores[np.uintp(first + j)] += widened(mask[np.uintp(of_mask + r * mask_step + t * mask_next + j)])
            _softmax(scores, first, count, scratch)
            sums[:] = np.float32(0.0)
            _add_products(scores, first, wide_values, value_depth, sums, (count, value_depth))
            to = of_out + r * out_step + t * out_next
            for i in range(value_depth):
                out[np.uintp(to + i)] = narrowed(sums[np.uintp(i)], out)


@njit
@no_type_check
def attend_task(call, like, task) -> None:
    """Computes the attention of one request and one key head. call: the numbers of `attention_call`.  like: an array
    with the dtype of the stored numbers."""
    places = carray(pointer(call[5]), (call[6], 5), np.int64)
    heads, groups, width, depth, value_depth = call[7], call[8], call[9], call[10], call[11]
    repeats, steps = heads // groups, (call[22], call[14], call[15], call[17], call[24])
    scale, cap = np.float32(np.int64(call[19]).view(np.float64)), np.float32(np.int64(call[27]).view(np.float64))
    q, keys = carray(pointer(call[0]), (1,), like.dtype), carray(pointer(call[1]), (1,), like.dtype)
    values, mask = carray(pointer(call[2]), (1,), like.dtype), carray(pointer(call[3]), (1,), like.dtype)
    out = carray(pointer(call[4]), (1,), like.dtype)
    row, to_keys, to_values, slots, start = places[task // groups]
    group = task % groups
    head = group * repeats
    at = (
        row * call[26] + head * call[22], to_keys + group * call[12], to_values + group * call[13],
        row * call[16] + head * call[17], row * heads * width * value_depth + head * call[24],
    )  # fmt: skip
    sizes = (repeats, width, depth, value_depth, slots, start)
    _attend((q, keys, values, mask, out), at, steps, (call[23], call[18], call[25]), sizes, scale, cap)


@njit
@no_type_check
def store_task(call, like, task) -> None:
    """Copies the new keys and values of one batch index into the cache. call: the numbers of `store_call`."""
    width, groups = call[6], call[7]
    row = carray(pointer(call[4]), (call[8],), np.int64)[task]
    start = carray(pointer(call[5]), (call[8],), np.int64)[task]
    if row < 0:  # compared instead
        return
    for part in range(2):
        depth, row_step, head_step, slot_step = call[9 + part], call[11 + part], call[13 + part], call[15 + part]
        new_row, new_head, new_slot = call[17 + part], call[19 + part], call[21 + part]
        new = carray(pointer(call[part]), (1,), like.dtype)
        held = carray(pointer(call[2 + part]), (1,), like.dtype)
        for t in range(width):
            for head in range(groups):
                at = task * new_row + head * new_head + t * new_slot
                to = row * row_step + head * head_step + (start + t) * slot_step
                for i in range(depth):
                    held[np.uintp(to + i)] = new[np.uintp(at + i)]


def attention_work(format: int) -> CFunc:
    """Returns the compiled function that computes an attention call in one thread, for a format of all tensors."""
    stored = STORED[format]

    @no_type_check
    def run(data) -> None:
        """Takes (request, key head) pairs from a counter that all threads share, until none is left. data: address of
        the numbers of `attention_call`."""
        call, like = carray(data, (NUMBERS,), np.int64), np.empty(0, stored)
        while True:
            task = fetch_and_increment(call.ctypes.data + 20 * 8)
            if task >= call[6] * call[8]:
                break
            attend_task(call, like, task)
            fetch_and_increment(call.ctypes.data + 21 * 8)

    return work(run)


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
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    places: NDArray[np.int64],
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Returns attention outputs [b, h, t, dv] of queries [b, h, t, d], with an additive mask [b, 1 or h, t, s].
    Requests that are not in `places` give zeros.

    keys, values: [1, g, s, d] and [1, g, s, dv] of any one request.
    places: int64 [n, 5] for n requests: batch index, offset in elements from `keys` and from `values` to that request's
    own, number of slots to attend to, position of its first token.
    softcap: limits scores s to softcap * tanh(s / softcap), before the mask is added; None for no limit.
    Raises: ValueError for tensors of different dtypes, a mask of another shape, keys or values whose last dimension is
    not contiguous, and a request that attends to no slot of its own; RuntimeError if the compiled loops ended early.
    Twin: ops.references.cached_attention, close: sums are ordered otherwise.
    """
    q, mask = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, mask))
    call, out = attention_call(q, keys, values, mask, places, scale, softcap)
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
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    places: NDArray[np.int64],
    scale: float,
    softcap: float | None = None,
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
            np.float64(softcap or 0.0).view(np.int64),
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
    """Returns the numbers that describe a cache write to the loops: as `ops.references.store_kv`, with int64 rows and
    starts. k, v: [b, g, t, d]. The arguments must live until the loops have run.

    Raises: ValueError for new keys or values of another layout or dtype, and for rows or starts of another dtype.
    """
    for new, held in ((k, keys), (v, values)):
        if new.stride(3) != 1 or new.dtype != held.dtype or held.stride(3) != 1:
            raise ValueError(f"a cache of {held.dtype} and new {new.dtype} of strides {new.stride()} are not written")
    if {rows.dtype, starts.dtype} != {torch.int64}:
        raise ValueError(f"rows of {rows.dtype} and starts of {starts.dtype}; both must be int64")
    steps = zip((*keys.stride()[:3], *k.stride()[:3]), (*values.stride()[:3], *v.stride()[:3]), strict=True)
    return np.array(
        (
            *(tensor.data_ptr() for tensor in (k, v, keys, values, rows, starts)), k.shape[2], k.shape[1], len(k),
            k.shape[3], v.shape[3], *(step for pair in steps for step in pair),
        ),
        np.int64,
    )  # fmt: skip
