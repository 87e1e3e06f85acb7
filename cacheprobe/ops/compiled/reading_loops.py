"""Defines the loops that read logits: largest tokens, log-sum-exp, entropy and rank, compiled by numba.

The sums of CHUNK logits are computed together; the chunks of a row are added in their order. So the bits of a row
depend on nothing but its logits.
"""

import math
from typing import no_type_check

import numpy as np
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from numba.core.ccallback import CFunc

from cacheprobe.ops.compiled.basics import (
    STORED,
    compiled,
    exponential,
    fetch_and_increment,
    fold_sum,
    largest,
    narrowed,
    pointer,
    soft_capped,
    widened,
    work,
)
from cacheprobe.ops.compiled.blocks import BLOCK, LOWEST, count_block, sum_block, widen_block
from cacheprobe.ops.compiled.lanes import FLOAT32, OUTPUTS, TILES
from cacheprobe.ops.compiled.loops import multiply
from cacheprobe.ops.compiled.tiles import SIDE, multiply_packed, use_tiles

CHUNK = 512
"""Number of logits that have partial sums of their own."""

NUMBERS = 24
"""How many whole numbers describe a call; `CompiledReadout` writes them."""


@njit
@no_type_check
def _num_before(wide, count, target, value):
    """Counts the logits of a chunk that rank before the target: larger ones, and equal ones with a lower id. target:
    its index relative to the first logit."""
    num = 0
    for block in range(0, count, BLOCK):
        if count - block >= BLOCK and (target < block or target >= block + BLOCK):
            num += count_block(wide, block, value, target >= block + BLOCK)
            continue
        for j in range(block, min(block + BLOCK, count)):
            x = wide[np.uintp(j)]
            num += x > value or (x == value and j < target)
    return num


@njit
@no_type_check
def _sums(wide, at, count, best):
    """Returns what `sum_block` returns, of fewer logits than a block."""
    weights, products, has_nan = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), False
    for j in range(count):
        x = wide[np.uintp(at + j)]
        has_nan |= np.isnan(x)
        shifted = max(x - best, np.float32(LOWEST))
        weights[j] = exponential(shifted)
        products[j] = weights[j] * shifted
    return fold_sum(weights, count), fold_sum(products, count), has_nan


@njit
@no_type_check
def _insert(values, ids, at, k, value, token) -> None:
    """Puts a token into a list of the k best so far, [at, at + k), if it is larger than the last one."""
    if ids[at + k - 1] >= 0 and not value > values[at + k - 1]:
        return
    j = k - 1
    while j > 0 and (ids[at + j - 1] < 0 or value > values[at + j - 1]):
        values[at + j], ids[at + j] = values[at + j - 1], ids[at + j - 1]
        j -= 1
    values[at + j], ids[at + j] = value, token


@njit
@no_type_check
def _read_chunk(stored, at, count, first, target, lists, wide, out) -> None:
    """Reads the logits [at, at + count) of a chunk whose first token id is `first`. Puts its tokens into the list of
    the best, and (best, total, weighted, number before the target) into `out`.

    target: token id, logit.  lists: values, ids, length and start of the list.
    """
    (top_values, top_ids, k, list_at), (target_id, value) = lists, target
    best = np.float32(-np.inf)
    for block in range(0, count, BLOCK):
        size = min(BLOCK, count - block)
        if size == BLOCK:
            most = widen_block(stored, at + block, wide, block)
        else:
            for j in range(block, count):
                wide[np.uintp(j)] = widened(stored[np.uintp(at + j)])
            most = largest(wide, block, size)
        best = max(best, most)
        if top_ids[list_at + k - 1] < 0 or most > top_values[list_at + k - 1]:
            for j in range(block, block + size):
                _insert(top_values, top_ids, list_at, k, wide[j], first + j)
    total, weighted, has_nan = np.float64(0.0), np.float64(0.0), False
    for block in range(0, count, BLOCK):
        if count - block >= BLOCK:
            part, part_weighted, is_nan = sum_block(wide, block, best)
        else:
            part, part_weighted, is_nan = _sums(wide, block, count - block, best)
        total += np.float64(part)
        has_nan |= is_nan
        weighted += np.float64(part_weighted)
    if has_nan:  # an infinite best: the row has no distribution, and torch reads it
        best = np.float32(np.inf)
    out[0], out[1], out[2] = best, total, weighted
    if target_id < 0:
        out[3] = -1
    else:
        out[3] = _num_before(wide, count, target_id - first, value) if best >= value else 0


@njit
@no_type_check
def _lists_of(call, thread, row):
    """Returns the list of the best tokens that a thread keeps of a row: arrays of all lists, its length, its start."""
    rows, k, threads = call[5], call[14], call[15]
    values = carray(pointer(call[12]), (threads * rows * k,), np.float32)
    ids = carray(pointer(call[13]), (threads * rows * k,), np.int64)
    return values, ids, k, (thread * rows + row) * k


@njit
@no_type_check
def _read_rows(call, logits, row_step, rows_read, first, count, thread, wide) -> None:
    """Reads a chunk of some rows, whose logits begin at `logits[r * row_step]`. rows_read: the first, how many."""
    rows, chunk = call[5], first // CHUNK
    targets = carray(pointer(call[3]), (rows,), np.int64)
    values = carray(pointer(call[4]), (rows,), np.float32)
    out = carray(pointer(call[11]), ((call[7] + CHUNK - 1) // CHUNK * rows * 4,), np.float64)
    first_row, num_rows = rows_read
    for r in range(num_rows):
        row = first_row + r
        lists, at = _lists_of(call, thread, row), (chunk * rows + row) * 4
        _read_chunk(
            logits, r * row_step, count, first, (targets[row], values[row]), lists, wide, out[at : at + 4]
        )  # fmt: skip


@njit
@no_type_check
def _cap(logits, first, count, cap) -> None:
    """Replaces the logits [first, first + count) by cap * tanh(logits / cap), rounded to their dtype at each step, as
    torch's operations round."""
    for i in range(first, first + count):
        scaled = widened(narrowed(np.float32(widened(logits[np.uintp(i)]) / cap), logits))
        bent = widened(narrowed(soft_capped(scaled, np.float32(1.0)), logits))
        logits[np.uintp(i)] = narrowed(np.float32(bent * cap), logits)


@njit
@no_type_check
def _cap_of(call):
    return np.float32(np.int64(call[22]).view(np.float64))


def logits_work(format: int) -> CFunc:
    """Returns the compiled function that reads given logits of a format in one thread."""
    stored = STORED[format]

    @no_type_check
    def run(data) -> None:
        """Takes rows from a counter until none is left. data: address of the numbers that `CompiledReadout` wrote."""
        call = carray(data, (NUMBERS,), np.int64)
        thread, wide, width = fetch_and_increment(call.ctypes.data + 17 * 8), np.empty(CHUNK, np.float32), call[7]
        while True:
            row = fetch_and_increment(call.ctypes.data + 18 * 8)
            if row >= call[5]:
                break
            logits = carray(pointer(call[0] + row * call[8]), (width,), stored)
            for first in range(0, width, CHUNK):
                part = logits[first : first + CHUNK]
                _read_rows(call, part, 0, (row, 1), first, min(CHUNK, width - first), thread, wide)
            fetch_and_increment(call.ctypes.data + 19 * 8)

    return work(run)


def targets_work(kind: int, format: int) -> CFunc:
    """Returns the compiled function that computes the logit of every row's target token, in one thread, for a kind of
    innermost loop and a format of weight and logits."""
    stored, size = STORED[format], 4 if format == FLOAT32 else 2

    @no_type_check
    def run(data) -> None:
        """Takes rows from a counter until none is left. data: address of the numbers that `CompiledReadout` wrote."""
        call = carray(data, (NUMBERS,), np.int64)
        targets = carray(pointer(call[3]), (call[5],), np.int64)
        inner, like, cap = call[6], np.empty(0, stored), _cap_of(call)
        wide, of_block = np.empty(OUTPUTS * inner * call[16], np.float32), np.empty(SIDE, stored)
        use_tiles(kind, 1)
        while True:
            row = fetch_and_increment(call.ctypes.data + 18 * 8)
            if row >= call[5]:
                break
            token = max(targets[row], 0)
            weight, bias = (call[1] + token * call[9], call[9]), (call[2] + token * call[20], call[20])
            if kind == TILES:
                first = row // SIDE * SIDE
                places = (
                    call[0] + first * call[8], 0, *weight, inner, *bias, np.int64(of_block.ctypes.data), size, SIDE
                )  # fmt: skip
                multiply_packed(kind, format, 0, 1, places)
                carray(pointer(call[21]), (call[5],), stored)[row] = of_block[row - first]
            else:
                multiply(
                    kind, format, (like, wide), (1, 1, inner), (call[0] + row * call[8], call[8]), weight, bias,
                    (call[21] + row * size, size),
                )  # fmt: skip
            if cap > np.float32(0.0):
                _cap(carray(pointer(call[21]), (call[5],), stored), row, 1, cap)
            fetch_and_increment(call.ctypes.data + 19 * 8)
        use_tiles(kind, 0)

    return work(run)


def states_work(kind: int, format: int) -> CFunc:
    """Returns the compiled function that multiplies states by an unembedding and reads the logits, in one thread, for a
    kind of innermost loop and a format of weight and logits."""
    stored, size = STORED[format], 4 if format == FLOAT32 else 2

    @no_type_check
    def run(data) -> None:
        """Takes chunks of token ids from a counter until none is left, and reads each for every row. The logits of a
        chunk are never stored beyond the processor's cache."""
        call = carray(data, (NUMBERS,), np.int64)
        thread, wide = fetch_and_increment(call.ctypes.data + 17 * 8), np.empty(CHUNK, np.float32)
        rows, inner, width, block, cap = call[5], call[6], call[7], call[10], _cap_of(call)
        of_weight, logits = np.empty(OUTPUTS * inner * call[16], np.float32), np.empty(block * CHUNK, stored)
        use_tiles(kind, 1)
        while True:
            first = fetch_and_increment(call.ctypes.data + 18 * 8) * CHUNK
            if first >= width:
                break
            count = min(CHUNK, width - first)
            for r in range(0, rows, block):
                num_rows = min(block, rows - r)
                multiply(
                    kind, format, (logits, of_weight), (num_rows, count, inner), (call[0] + r * call[8], call[8]),
                    (call[1] + first * call[9], call[9]), (call[2] + first * call[20], call[20]),
                    (np.int64(logits.ctypes.data), CHUNK * size),
                )  # fmt: skip
                for row in range(num_rows * (cap > np.float32(0.0))):
                    _cap(logits, row * CHUNK, count, cap)
                _read_rows(call, logits, CHUNK, (r, num_rows), first, count, thread, wide)
            fetch_and_increment(call.ctypes.data + 19 * 8)
        use_tiles(kind, 0)

    return work(run)


@compiled
@no_type_check
def combine(parts, lists, lists_ids, targets, best, out_numbers, out_before) -> None:
    """Adds up the chunks of every row, and merges the lists of the threads.

    parts: [chunks, rows, 4].  lists, lists_ids: [threads, rows, k].  targets: logit [rows], and whether there is one.
    best: [rows, k] log-probabilities and ids, written here; so are out_numbers [rows, 2], entropy and the target's
    log-probability, and out_before [rows].
    """
    (target_values, has_target), (out_values, out_ids) = targets, best
    chunks, rows = parts.shape[0], parts.shape[1]
    threads, k = lists.shape[0], lists.shape[2]
    at = np.empty(threads, np.int64)
    for row in range(rows):
        most, total, weighted, before = -np.inf, 0.0, 0.0, 0.0
        for chunk in range(chunks):
            most = max(most, parts[chunk, row, 0])
        if not math.isfinite(most):
            total = np.nan
        for chunk in range(chunks):
            shift = parts[chunk, row, 0] - most
            if shift == -np.inf:  # a chunk of tokens that cannot occur
                continue
            scale = math.exp(shift)
            weighted += (parts[chunk, row, 2] + parts[chunk, row, 1] * shift) * scale
            total += parts[chunk, row, 1] * scale
        for chunk in range(chunks):
            before += parts[chunk, row, 3]
        logsumexp = math.log(total) + most if total > 0 else np.nan
        out_numbers[row, 0] = math.log(total) - weighted / total if total > 0 else np.nan
        out_numbers[row, 1] = target_values[row] - logsumexp if has_target[row] else np.nan
        out_before[row] = np.int64(before) if has_target[row] else -1
        at[:] = 0
        for j in range(k):
            chosen = -1
            for t in range(threads):
                if at[t] == k or lists_ids[t, row, at[t]] < 0:
                    continue
                if chosen < 0:
                    chosen = t
                    continue
                value, other = lists[t, row, at[t]], lists[chosen, row, at[chosen]]
                if value > other or (value == other and lists_ids[t, row, at[t]] < lists_ids[chosen, row, at[chosen]]):
                    chosen = t
            out_values[row, j] = lists[chosen, row, at[chosen]] - logsumexp
            out_ids[row, j] = lists_ids[chosen, row, at[chosen]]
            at[chosen] += 1
