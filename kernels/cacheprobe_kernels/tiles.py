"""What several kernels are made of: changes of type, and a product of fixed tiles."""

import triton
import triton.language as tl

from cacheprobe_kernels.base import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def widen(values):
    """To float32. The interpreter would take bfloat16 for integers, so there its bits are moved by hand."""
    if _INTERPRETED and values.dtype == tl.bfloat16:
        wide = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def narrow(values, dtype: tl.constexpr):
    """From float32 to the nearest number of another type, ties to even; the interpreter's own rounding is wrong."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = tl.where(values == values, rounded, 0x7FC0)
        narrowed = quiet.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrowed = values.to(dtype)
    return narrowed


@triton.jit
def product(a, b, total):
    """total + a b, [n i] and [i o], kept in float32. Products of 16-bit numbers are exact there.

    The interpreter adds term after term: what a library does with a row may depend on the row's place.
    """
    if _INTERPRETED:
        total += tl.sum(widen(a)[:, :, None] * widen(b)[None, :, :], 1)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def tile_product(
    a, has_a, b, has_b, width, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr
):  # fmt: skip
    """[BLOCK_N, BLOCK_O] dot products of rows at the addresses a and b, in steps of BLOCK_I from the first number on.

    The order of an element's sum is a function of the width alone.
    """
    total = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for start in range(0, width, BLOCK_I):
        at = start + tl.arange(0, BLOCK_I)
        inside = at < width
        left = tl.load(a[:, None] + at[None, :], mask=has_a[:, None] & inside[None, :], other=0.0)
        right = tl.load(b[None, :] + at[:, None], mask=has_b[None, :] & inside[:, None], other=0.0)
        total = product(left, right, total)
    return total
