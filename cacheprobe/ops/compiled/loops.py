"""Defines the loops of matrix products, compiled by numba.

A number of a result depends on its own row and its own output alone: not on the other rows, on how many there are, or
on the thread that computes it.

Functions that are compiled for several kinds of loop take the kind and the format as constants (numba's `literally`).
numba's cache on disk keeps a function that closes over whole numbers, but no function that closes over functions.
"""

from typing import no_type_check

import numpy as np
from numba import carray, literally, njit  # pyright: ignore[reportPrivateImportUsage]

from cacheprobe.ops.compiled.basics import pointer, widened
from cacheprobe.ops.compiled.lanes import FLOAT32, OUTPUTS, ROWS, TILES, multiply_tile
from cacheprobe.ops.compiled.tiles import SIDE, multiply_packed

_TWO, _THREE = min(2, ROWS), min(3, ROWS)


@njit
@no_type_check
def _tile(kind, format, shape, values, weight, bias, out) -> None:
    """Computes the next rows of some outputs.

    shape: rows that are left, of which ROWS are computed; outputs, up to OUTPUTS; inner width; whether no other rows
    came before, whose tiles found the weights in the processor's cache.  values, weight, out: (address, bytes from one
    row to the next).
    """
    literally(kind)
    literally(format)
    num_rows, outputs, inner, is_first = shape
    if outputs == OUTPUTS:
        places = (values[0], values[1], weight[0], weight[1], inner, bias, out[0], out[1])
        if num_rows >= ROWS and is_first:
            multiply_tile(kind, format, ROWS, OUTPUTS, 1, places)
        elif num_rows >= ROWS:
            multiply_tile(kind, format, ROWS, OUTPUTS, 0, places)
        elif num_rows == 3:
            multiply_tile(kind, format, _THREE, OUTPUTS, 1, places)
        elif num_rows == 2:
            multiply_tile(kind, format, _TWO, OUTPUTS, 1, places)
        else:
            multiply_tile(kind, format, 1, OUTPUTS, 1, places)
        return
    size = 4 if format == FLOAT32 else 2
    for r in range(min(num_rows, ROWS)):
        for j in range(outputs):
            row, output, at = values[0] + r * values[1], weight[0] + j * weight[1], out[0] + r * out[1] + j * size
            places = (row, values[1], output, weight[1], inner, bias + 4 * j, at, out[1])
            multiply_tile(kind, format, 1, 1, 0, places)


@njit
@no_type_check
def _multiply_packed(kind, format, shape, values, weight, bias, out) -> None:
    """Computes values weight^T + bias of packed rows (`tiles.PackedPlaces`), as `multiply`."""
    literally(kind)
    literally(format)
    rows, outputs, inner = shape
    size, o = 4 if format == FLOAT32 else 2, 0
    while o < outputs:
        left, most = outputs - o, 4 * SIDE if rows <= SIDE else 2 * SIDE
        count = most if left >= most else SIDE if left >= SIDE else 1
        for r in range(0, rows, 2 * SIDE if count == 2 * SIDE else SIDE):
            places = (
                values[0] + r * values[1], SIDE * values[1], weight[0] + o * weight[1], weight[1], inner,
                bias[0] + o * bias[1], bias[1], out[0] + r * out[1] + o * size, out[1], rows - r,
            )  # fmt: skip
            if count == 4 * SIDE:
                multiply_packed(kind, format, 4, 1, places)
            elif count == 2 * SIDE and rows - r > SIDE:
                multiply_packed(kind, format, 2, 2, places)
            elif count == 2 * SIDE:
                multiply_packed(kind, format, 2, 1, places)
            elif count == SIDE:
                multiply_packed(kind, format, 1, 1, places)
            else:
                multiply_packed(kind, format, 0, 1, places)
        o += count


@njit
@no_type_check
def multiply(kind, format, arrays, shape, values, weight, bias, out) -> None:
    """Computes values weight^T + bias for some rows and outputs, tile by tile.

    shape: rows, outputs, inner width.  values, weight, bias, out: (address, bytes from one row or output to the next).
    For TILES the values are packed, and begin at a multiple of 16 rows.
    arrays: an array with the dtype of the weight's stored numbers; and one with room for OUTPUTS rows of the weight in
    float32, if the weight must be converted, else empty.
    """
    literally(kind)
    literally(format)
    if kind == TILES:
        _multiply_packed(kind, format, shape, values, weight, bias, out)
        return
    (rows, outputs, inner), (like, wide) = shape, arrays
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
                kind, format, (rows - r, count, inner, r == 0), (values[0] + r * values[1], values[1]), part,
                bias[0] + o * bias[1], (out[0] + r * out[1] + o * size, out[1]),
            )  # fmt: skip
