"""Defines the loops of matrix products, compiled by numba.

A number of a result depends on its own row and its own output alone: not on the other rows, on how many there are, or
on the thread that computes it.

Functions that are compiled for several kinds of loop take the kind and the format as constants (numba's `literally`).
numba's cache on disk keeps a function that closes over whole numbers, but no function that closes over functions.
"""

from typing import no_type_check

import numpy as np
from numba import carray, literally, njit  # pyright: ignore[reportPrivateImportUsage]
from numba.core.ccallback import CFunc

from cacheprobe.ops.compiled.basics import STORED, fetch_and_increment, pointer, widened, work
from cacheprobe.ops.compiled.lanes import FLOAT32, OUTPUTS, ROWS, multiply_tile

NUMBERS = 16
"""How many whole numbers describe a product; `CompiledProduct` writes them."""

_TWO, _THREE = min(2, ROWS), min(3, ROWS)


@njit
@no_type_check
def _tile(kind, format, num_rows, outputs, values, weight, inner, bias, out) -> None:
    """Computes the first rows (ROWS, or `num_rows` if fewer are left) of up to OUTPUTS outputs. values, weight, out:
    (address, bytes from one row to the next)."""
    literally(kind)
    literally(format)
    if outputs == OUTPUTS:
        places = (values[0], values[1], weight[0], weight[1], inner, bias, out[0], out[1])
        if num_rows >= ROWS:
            multiply_tile(kind, format, ROWS, OUTPUTS, places)
        elif num_rows == 3:
            multiply_tile(kind, format, _THREE, OUTPUTS, places)
        elif num_rows == 2:
            multiply_tile(kind, format, _TWO, OUTPUTS, places)
        else:
            multiply_tile(kind, format, 1, OUTPUTS, places)
        return
    size = 4 if format == FLOAT32 else 2
    for r in range(min(num_rows, ROWS)):
        for j in range(outputs):
            row, output, at = values[0] + r * values[1], weight[0] + j * weight[1], out[0] + r * out[1] + j * size
            places = (row, values[1], output, weight[1], inner, bias + 4 * j, at, out[1])
            multiply_tile(kind, format, 1, 1, places)


@njit
@no_type_check
def multiply(kind, format, like, shape, values, weight, bias, out, wide) -> None:
    """Computes values weight^T + bias for some rows and outputs, tile by tile.

    shape: rows, outputs, inner width.  values, weight, bias, out: (address, bytes from one row or output to the next).
    like: an array with the dtype of the weight's stored numbers.  wide: room for OUTPUTS rows of the weight in float32,
    if the weight must be converted; else empty.
    """
    literally(kind)
    literally(format)
    rows, outputs, inner = shape
    size = 4 if format == FLOAT32 else 2
    for o in range(0, outputs, OUTPUTS):
        count = min(OUTPUTS, outputs - o)
        part = (weight[0] + o * weight[1], weight[1])
        if len(wide):
            for j in range(count):
                row = carray(pointer(part[0] + j * part[1]), (inner,), like.dtype)
                for i in range(inner):
                    wide[np.uintp(j * inner + i)] = widened(row[np.uintp(i)])
            part = (np.int64(wide.ctypes.data), 4 * inner)
        for r in range(0, rows, ROWS):
            _tile(
                kind, format, rows - r, count, (values[0] + r * values[1], values[1]), part, inner,
                bias[0] + o * bias[1], (out[0] + r * out[1] + o * size, out[1]),
            )  # fmt: skip


def product_work(kind: int, format: int) -> CFunc:
    """Returns the compiled function that computes a product in one thread, for a kind of innermost loop and a format of
    weight and results."""
    stored, size = STORED[format], 4 if format == FLOAT32 else 2

    @no_type_check
    def run(data) -> None:
        """Takes panels of outputs from a counter until none is left. data: address of the NUMBERS numbers that
        `CompiledProduct` wrote."""
        call = carray(data, (NUMBERS,), np.int64)
        rows, inner, width, block, panel = call[4], call[5], call[6], call[10], call[11]
        wide, like = np.empty(OUTPUTS * inner * call[12], np.float32), np.empty(0, stored)
        while True:
            first = fetch_and_increment(call.ctypes.data + 14 * 8) * panel
            if first >= width:
                break
            outputs = min(panel, width - first)
            for r in range(0, rows, block):
                multiply(
                    kind, format, like, (min(block, rows - r), outputs, inner), (call[0] + r * call[7], call[7]),
                    (call[1] + first * call[8], call[8]), (call[2] + first * call[13], call[13]),
                    (call[3] + r * call[9] + first * size, call[9]), wide,
                )  # fmt: skip
            fetch_and_increment(call.ctypes.data + 15 * 8)

    return work(run)
