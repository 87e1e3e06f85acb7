"""Defines the loops of a forward that take one row or one number at a time (norms, activations, sums, copies), and the
function that computes a queue of operations, one after another, on all threads.

Every result is rounded to the dtype where the model's modules round it. To wake a thread takes longer than a small
operation. So the threads are woken once for a whole queue.
"""

from typing import no_type_check

import numpy as np
from numba import carray, literally, njit  # pyright: ignore[reportPrivateImportUsage]
from numba.core.ccallback import CFunc

from cacheprobe.ops.compiled.attention import NUMBERS as ATTENTION_NUMBERS
from cacheprobe.ops.compiled.attention import STORE_NUMBERS, attend_task, store_task
from cacheprobe.ops.compiled.basics import (
    STORED,
    exponential,
    fetch_and_increment,
    fold_sum,
    multiply_add,
    narrowed,
    pointer,
    wait_until,
    widened,
    work,
)
from cacheprobe.ops.compiled.lanes import FLOAT32, FLOATS, LANES, OUTPUTS
from cacheprobe.ops.compiled.loops import multiply
from cacheprobe.ops.compiled.tiles import SIDE, use_tiles


@njit(error_model="numpy")
@no_type_check
def norm_row(values, weight, width, eps, out, sums, kind) -> None:
    """Writes the RMSNorm of the first `width` numbers of `values` to `out`. sums: room for LANES numbers; sum l takes
    every l-th square.  kind: see `queue.NormKind`."""
    whole = width // LANES * LANES
    sums[:] = np.float32(0.0)
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            x = widened(values[np.uintp(i + lane)])
            sums[np.uintp(lane)] = multiply_add(x, x, sums[np.uintp(lane)])
    for i in range(whole, width):
        x = widened(values[np.uintp(i)])
        sums[np.uintp(i - whole)] = multiply_add(x, x, sums[np.uintp(i - whole)])
    mean = fold_sum(sums, LANES) / np.float32(width)
    scale = np.float32(1.0) / np.sqrt(np.float32(mean + eps))
    rounds_first, added = kind[0], np.float32(kind[1])
    if rounds_first:
        for i in range(width):
            scaled = widened(narrowed(np.float32(widened(values[np.uintp(i)]) * scale), out))
            out[np.uintp(i)] = narrowed(np.float32(widened(weight[np.uintp(i)]) * scaled), out)
    else:
        for i in range(width):
            scaled = np.float32(widened(values[np.uintp(i)]) * scale)
            factor = np.float32(widened(weight[np.uintp(i)]) + added)
            out[np.uintp(i)] = narrowed(np.float32(factor * scaled), out)


@njit(error_model="numpy")
@no_type_check
def silu_numbers(values, start, end, out) -> None:
    """Writes silu(values) to the elements [start, end) of `out`. silu(x) = x / (1 + exp(-x))."""
    one = np.float32(1.0)
    for i in range(start, end):
        x = widened(values[np.uintp(i)])
        power = exponential(-abs(x))
        number = x if x >= np.float32(0.0) else np.float32(x * power)
        out[np.uintp(i)] = narrowed(np.float32(number / (one + power)), out)


@njit
@no_type_check
def widen_numbers(values, start, end, out) -> None:
    """Converts the elements [start, end) of `values`, in 16 bits or float32, to float32, and writes them to the same
    places of `out`."""
    for i in range(start, end):
        out[np.uintp(i)] = widened(values[np.uintp(i)])


PRODUCT, NORM, SILU, WIDEN, PACK, STORE, ATTEND, MAP = range(8)
"""Operations."""

SUM, TIMES, MINUS, COPY = range(4)
"""Operations of a MAP: a + b, a * b, -a and a."""

MAP_NUMBERS = 21
"""How many whole numbers describe a MAP; `Queue.mapped` writes them."""

NUMBERS = 24
"""How many whole numbers describe an operation. Two counters come first, in a part of memory of their own: the next
task, and the tasks done. Then, from FIELDS on: operation, whether it waits for all operations before it, number of
tasks, and what `_compute` reads."""

FIELDS = 8

ROWS_AT_ONCE, NUMBERS_AT_ONCE = 4, 4096
"""Rows of a norm that are one task, and numbers of an operation on single numbers."""


@njit
@no_type_check
def _product(kind, format, like, step, task, wide) -> None:
    """Computes one panel of outputs of a product, for all rows."""
    literally(kind)
    literally(format)
    rows, inner, width, block, panel, bias_step = step[7], step[8], step[9], step[10], step[11], step[12]
    size = 4 if format == FLOAT32 else 2
    value_bytes = (4 if kind == FLOATS else 2) * inner
    first = task * panel
    outputs = min(panel, width - first)
    for r in range(0, rows, block):
        multiply(
            kind, format, (like, wide[: OUTPUTS * inner]), (min(block, rows - r), outputs, inner),
            (step[3] + r * value_bytes, value_bytes), (step[4] + first * size * inner, size * inner),
            (step[5] + first * bias_step, bias_step), (step[6] + (r * width + first) * size, width * size),
        )  # fmt: skip


@njit
@no_type_check
def _norm(like, step, task, sums) -> None:
    """Computes the RMSNorm of some rows."""
    rows, width, eps = step[6], step[7], np.float32(np.int64(step[8]).view(np.float64))
    weight = carray(pointer(step[4]), (width,), like.dtype)
    for row in range(task * ROWS_AT_ONCE, min(rows, (task + 1) * ROWS_AT_ONCE)):
        offset = row * width * like.itemsize
        values = carray(pointer(step[3] + offset), (width,), like.dtype)
        out = carray(pointer(step[5] + offset), (width,), like.dtype)
        norm_row(values, weight, width, eps, out, sums, (step[9], step[10]))


@njit
@no_type_check
def _pack(step, task) -> None:
    """Packs 16 rows (`tiles.PackedPlaces`). Rows beyond the last keep what the memory held: their sums are
    computed, but not stored."""
    rows, pairs = step[6], step[7] // 2
    count = min(SIDE, rows - task * SIDE)
    values = carray(pointer(step[3] + task * SIDE * pairs * 4), (count * pairs,), np.uint32)
    out = carray(pointer(step[5] + task * SIDE * pairs * 4), (SIDE * pairs,), np.uint32)
    for pair in range(pairs):
        for r in range(count):
            out[np.uintp(pair * SIDE + r)] = values[np.uintp(r * pairs + pair)]


@njit
@no_type_check
def _by_number(like, step, task) -> None:
    """Computes an operation on single numbers, for some of them."""
    count = step[6]
    start, end = task * NUMBERS_AT_ONCE, min(count, (task + 1) * NUMBERS_AT_ONCE)
    values = carray(pointer(step[3]), (count,), like.dtype)
    if step[0] == SILU:
        silu_numbers(values, start, end, carray(pointer(step[5]), (count,), like.dtype))
    else:
        widen_numbers(values, start, end, carray(pointer(step[5]), (count,), np.float32))


@njit
@no_type_check
def _map_row(operation, a, b, out, count, steps) -> None:
    """Computes an operation of a MAP on `count` numbers. steps: elements from one number to the next, of each array."""
    of_a, of_b, of_out = steps
    if of_a == of_b == of_out == 1:  # the loops over neighbours are compiled for registers
        if operation == SUM:
            for i in range(count):
                total = np.float32(widened(a[np.uintp(i)]) + widened(b[np.uintp(i)]))
                out[np.uintp(i)] = narrowed(total, out)
        elif operation == TIMES:
            for i in range(count):
                product = np.float32(widened(a[np.uintp(i)]) * widened(b[np.uintp(i)]))
                out[np.uintp(i)] = narrowed(product, out)
        elif operation == MINUS:
            for i in range(count):
                out[np.uintp(i)] = narrowed(-widened(a[np.uintp(i)]), out)
        else:
            for i in range(count):
                out[np.uintp(i)] = a[np.uintp(i)]
        return
    for i in range(count):
        x, y = a[np.uintp(i * of_a)], widened(b[np.uintp(i * of_b)])
        if operation == COPY:
            out[np.uintp(i * of_out)] = x
        elif operation == MINUS:
            out[np.uintp(i * of_out)] = narrowed(-widened(x), out)
        else:
            number = np.float32(widened(x) + y) if operation == SUM else np.float32(widened(x) * y)
            out[np.uintp(i * of_out)] = narrowed(number, out)


@njit
@no_type_check
def _map_task(call, like, task) -> None:
    """Computes some rows of a MAP. call: operation, rows of a task, three addresses, and for each of four dimensions
    its size (5 to 8) and the steps of the three arrays (9 to 20, array by array)."""
    rows = call[5] * call[6] * call[7]
    size = like.itemsize
    for row in range(task * call[1], min(rows, (task + 1) * call[1])):
        third, second, first = row % call[7], row // call[7] % call[6], row // (call[7] * call[6])
        a_at = call[2] + (first * call[9] + second * call[10] + third * call[11]) * size
        b_at = call[3] + (first * call[13] + second * call[14] + third * call[15]) * size
        out_at = call[4] + (first * call[17] + second * call[18] + third * call[19]) * size
        a, b = carray(pointer(a_at), (1,), like.dtype), carray(pointer(b_at), (1,), like.dtype)
        out = carray(pointer(out_at), (1,), like.dtype)
        _map_row(call[0], a, b, out, call[8], (call[12], call[16], call[20]))


def queue_work(kind: int, format: int) -> CFunc:
    """Returns the compiled function that computes a queue in one thread, for a kind of product and a format of all
    tensors."""
    stored = STORED[format]
    widens = kind == FLOATS and format != FLOAT32

    @no_type_check
    def run(data) -> None:
        """Takes tasks of one operation after another. data: address of three numbers: how many operations there are,
        the address of their numbers, and the largest inner width of a product."""
        call = carray(data, (3,), np.int64)
        like, sums = np.empty(0, stored), np.empty(LANES, np.float32)
        wide = np.empty(OUTPUTS * call[2] * widens, np.float32)
        waited = 0
        use_tiles(kind, 1)
        for number in range(call[0]):
            counters = call[1] + number * NUMBERS * 8
            step = carray(pointer(counters + FIELDS * 8), (NUMBERS - FIELDS,), np.int64)
            if step[1]:
                for earlier in range(waited, number):
                    at = call[1] + earlier * NUMBERS * 8
                    wait_until(at + 8, carray(pointer(at + FIELDS * 8), (3,), np.int64)[2])
                waited = number
            while True:
                task = fetch_and_increment(counters)
                if task >= step[2]:
                    break
                if step[0] == PRODUCT:
                    _product(kind, format, like, step, task, wide)
                elif step[0] == NORM:
                    _norm(like, step, task, sums)
                elif step[0] == STORE:
                    store_task(carray(pointer(step[3]), (STORE_NUMBERS,), np.int64), like, task)
                elif step[0] == ATTEND:
                    attend_task(carray(pointer(step[3]), (ATTENTION_NUMBERS,), np.int64), like, task)
                elif step[0] == MAP:
                    _map_task(carray(pointer(step[3]), (MAP_NUMBERS,), np.int64), like, task)
                elif step[0] == PACK:
                    _pack(step, task)
                else:
                    _by_number(like, step, task)
                fetch_and_increment(counters + 8)
        use_tiles(kind, 0)

    return work(run)
