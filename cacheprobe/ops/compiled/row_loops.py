"""Defines the loops of a forward that take one row or one number at a time: norms, rotations, gates and sums.

Every result is rounded to the dtype where the model's modules round it.
"""

from typing import no_type_check

import numpy as np
from numba import njit  # pyright: ignore[reportPrivateImportUsage]

from cacheprobe.ops.compiled.basics import exponential, fold_sum, multiply_add, narrowed, widened
from cacheprobe.ops.compiled.lanes import LANES


@njit(error_model="numpy")
@no_type_check
def norm_row(values, weight, width, eps, out, sums) -> None:
    """Writes the RMSNorm of the first `width` numbers of `values` to `out`. sums: room for LANES numbers; sum l takes
    every l-th square."""
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
    for i in range(width):
        scaled = widened(narrowed(np.float32(widened(values[np.uintp(i)]) * scale), out))
        out[np.uintp(i)] = narrowed(np.float32(widened(weight[np.uintp(i)]) * scaled), out)


@njit(error_model="numpy")
@no_type_check
def gate_numbers(gate, up, start, end, out) -> None:
    """Writes silu(gate) * up to the elements [start, end) of `out`. silu(x) = x / (1 + exp(-x))."""
    one = np.float32(1.0)
    for i in range(start, end):
        x = widened(gate[np.uintp(i)])
        power = exponential(-abs(x))
        number = x if x >= np.float32(0.0) else np.float32(x * power)
        activated = widened(narrowed(np.float32(number / (one + power)), out))
        out[np.uintp(i)] = narrowed(np.float32(activated * widened(up[np.uintp(i)])), out)


@njit(error_model="numpy")
@no_type_check
def silu_numbers(values, start, end, out) -> None:
    """Writes silu(values) to the elements [start, end) of `out`, as `gate_numbers` computes it."""
    one = np.float32(1.0)
    for i in range(start, end):
        x = widened(values[np.uintp(i)])
        power = exponential(-abs(x))
        number = x if x >= np.float32(0.0) else np.float32(x * power)
        out[np.uintp(i)] = narrowed(np.float32(number / (one + power)), out)


@njit
@no_type_check
def add_numbers(values, others, start, end, out) -> None:
    """Writes values + others to the elements [start, end) of `out`."""
    for i in range(start, end):
        total = np.float32(widened(values[np.uintp(i)]) + widened(others[np.uintp(i)]))
        out[np.uintp(i)] = narrowed(total, out)


@njit
@no_type_check
def widen_numbers(values, start, end, out) -> None:
    """Writes values in float32 to the elements [start, end) of `out`."""
    for i in range(start, end):
        out[np.uintp(i)] = widened(values[np.uintp(i)])


@njit
@no_type_check
def rotate_row(values, heads, depth, cos, sin) -> None:
    """Rotates the heads of one token, [heads, depth], in place. cos, sin: `depth` numbers each, the first half of `sin`
    negated."""
    half = depth // 2
    for head in range(heads):
        at = head * depth
        for i in range(half):
            a, b = widened(values[np.uintp(at + i)]), widened(values[np.uintp(at + half + i)])
            kept = narrowed(np.float32(a * widened(cos[np.uintp(i)])), values)
            turned = narrowed(np.float32(b * widened(sin[np.uintp(i)])), values)
            kept_b = narrowed(np.float32(b * widened(cos[np.uintp(half + i)])), values)
            turned_b = narrowed(np.float32(a * widened(sin[np.uintp(half + i)])), values)
            values[np.uintp(at + i)] = narrowed(np.float32(widened(kept) + widened(turned)), values)
            values[np.uintp(at + half + i)] = narrowed(np.float32(widened(kept_b) + widened(turned_b)), values)
