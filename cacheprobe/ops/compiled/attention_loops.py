"""Defines the loops of attention over few new tokens and of cache writes, compiled by numba. A sum over n float32
numbers always has the same order.

Indices are cast to unsigned numbers: numba would otherwise let negative indices count from the end, which makes loops
slow.
"""

from typing import no_type_check

import numpy as np
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from numba.core.ccallback import CFunc

from cacheprobe.ops.compiled.basics import (
    STORED,
    exponential,
    fetch_and_increment,
    fold_sum,
    largest,
    multiply_add,
    narrowed,
    pointer,
    widened,
    work,
)
from cacheprobe.ops.compiled.lanes import FLOAT32, FLOATS, LANES, OUTPUTS
from cacheprobe.ops.compiled.loops import multiply

NUMBERS = 27
"""How many whole numbers describe an attention call; `attention.attention_call` writes them."""

STORE_NUMBERS = 17
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
def _attend(arrays, at, steps, by_token, sizes, scale) -> None:
    """Writes the attention outputs of tokens at consecutive positions, for one key head and the query heads that share
    it, to `out`. arrays: q, keys, values, mask, out. at: first element in each of the five. steps: from one slot or
    head to the next; by_token: from one token to the next."""
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
        FLOATS, FLOAT32, nothing, (repeats * width, slots, padded), (np.int64(query.ctypes.data), 4 * padded),
        (np.int64(wide.ctypes.data), 4 * padded), (np.int64(zeros.ctypes.data), 0),
        (np.int64(scores.ctypes.data), 4 * slots), nothing,
    )  # fmt: skip
    scratch[0], sums[0] = query[0] + wide[0], zeros[0]  # until here the three arrays are kept
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
    scale = np.float32(np.int64(call[19]).view(np.float64))
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
    _attend((q, keys, values, mask, out), at, steps, (call[23], call[18], call[25]), sizes, scale)


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
        new = carray(pointer(call[part]), (call[8] * width * groups * depth,), like.dtype)
        held = carray(pointer(call[2 + part]), (1,), like.dtype)
        for t in range(width):
            for head in range(groups):
                at = ((task * width + t) * groups + head) * depth
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
