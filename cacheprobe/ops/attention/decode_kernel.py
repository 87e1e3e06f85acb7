"""Defines the loops of attention over few new tokens, compiled by numba. A sum over n float32 numbers always has the
same order.

Indices are cast to unsigned numbers: numba would otherwise let negative indices count from the end, which makes loops
slow.
"""

from collections.abc import Callable
from typing import no_type_check

import numpy as np
from numba import carray, cfunc, config, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.ccallback import CFunc
from numba.extending import intrinsic, overload

if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
    raise ImportError("NUMBA_DISABLE_JIT is set, but cacheprobe's attention must be compiled; unset NUMBA_DISABLE_JIT")

_ANY_ORDER = {"contract", "nsz", "reassoc"}
"""Compiler flags with which a sum may be computed in vector lanes: in one order for each length."""


@intrinsic
@no_type_check
def _pointer(_typing, _address):
    """Converts an address, given as a whole number, into a pointer."""

    def make(context, builder, signature, args):
        """Emits LLVM code that converts the address."""
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), make


@intrinsic
@no_type_check
def _fetch_and_increment(_typing, _address):
    """Returns the whole number at an address, and adds one to the number in memory, atomically."""

    def make(_context, builder, _signature, args):
        """Emits LLVM code for the atomic increment."""
        number = args[0].type
        at = builder.inttoptr(args[0], number.as_pointer())
        return builder.atomic_rmw("add", at, number(1), "monotonic")

    return types.int64(types.int64), make


@intrinsic
@no_type_check
def _multiply_add(_typing, _a, _b, _c):
    """Returns a * b + c of float32 numbers, rounded once."""

    def make(_context, builder, _signature, args):
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), make


@no_type_check
def _widened(stored):
    """Returns a stored number as float32; a bfloat16 is stored as 16 bits, the upper half of a float32."""
    raise NotImplementedError("numba compiles the version below")


@overload(_widened, inline="always")
@no_type_check
def _(stored):
    def unchanged(stored):
        """Returns a float32 number unchanged."""
        return stored

    def from_bfloat16_bits(stored):
        """Returns a bfloat16 number, given as its 16 bits, as float32."""
        return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)

    return unchanged if stored == types.float32 else from_bfloat16_bits


@no_type_check
def _store(out, at, value) -> None:
    """Writes a float32 number to element `at` of `out`; a bfloat16 is rounded to nearest, ties to even."""
    raise NotImplementedError("numba compiles the version below")


@overload(_store, inline="always")
@no_type_check
def _(out, at, value):
    def store_float32(out, at, value) -> None:
        """Writes a float32 number to element `at` of `out`."""
        out[np.uintp(at)] = value

    def store_bfloat16(out, at, value) -> None:
        """Rounds a float32 number to bfloat16, and writes its 16 bits to element `at` of `out`."""
        word = np.float32(value).view(np.uint32)
        # adds just under half of the last kept bit, and that bit, so that ties go to even; 0x7FC0 is a NaN
        rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[np.uintp(at)] = np.uint16(0x7FC0) if np.isnan(value) else np.uint16(rounded)

    return store_float32 if out.dtype == types.float32 else store_bfloat16


@njit(inline="always")
@no_type_check
def _exponential(x):
    """Returns exp(x) for float32 x up to 0, to two units in the last place (Cephes' expf); zero for x below -87."""
    is_low = x < np.float32(-87.0)
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if is_low else p * power


@njit(fastmath=_ANY_ORDER)
@no_type_check
def _softmax(scores, at, count) -> None:
    largest = scores[np.uintp(at)]
    for j in range(count):
        largest = max(largest, scores[np.uintp(at + j)])
    for j in range(count):
        scores[np.uintp(at + j)] = _exponential(np.float32(scores[np.uintp(at + j)] - largest))
    total = np.float32(0.0)
    for j in range(count):
        total += scores[np.uintp(at + j)]
    for j in range(count):
        scores[np.uintp(at + j)] /= total


@njit(fastmath=_ANY_ORDER)
@no_type_check
def _dot(a, at, b, count):
    total = np.float32(0.0)
    for i in range(count):
        total += a[np.uintp(at + i)] * b[np.uintp(i)]
    return total


@njit(fastmath={"contract", "nsz"})
@no_type_check
def _add_scaled(sums, at, weight, vector, count) -> None:
    for i in range(count):
        sums[np.uintp(at + i)] += weight * vector[np.uintp(i)]


@njit(fastmath={"contract", "nsz"})
@no_type_check
def _widen(stored, at, wide, count, scale) -> None:
    for i in range(count):
        wide[np.uintp(i)] = _widened(stored[np.uintp(at + i)]) * scale


@njit
@no_type_check
def _attend(arrays, at, steps, sizes, scale) -> None:
    """Writes the attention output of one new token, for one key head and the query heads that share it, to `out`.
    arrays: q, keys, values, mask, out. at: first element in each of the five."""
    (q, keys, values, mask, out), (of_q, of_key, of_value, of_mask, of_out) = arrays, at
    (key_step, value_step, mask_step, _), (repeats, _, depth, value_depth, slots, _) = steps, sizes
    query, vector = np.empty(repeats * depth, np.float32), np.empty(max(depth, value_depth), np.float32)
    scores, sums = np.empty(repeats * slots, np.float32), np.zeros(repeats * value_depth, np.float32)
    one = np.float32(1.0)
    _widen(q, of_q, query, repeats * depth, scale)
    for j in range(slots):
        _widen(keys, of_key + j * key_step, vector, depth, one)
        for r in range(repeats):
            added = _widened(mask[np.uintp(of_mask + r * mask_step + j)])
            scores[np.uintp(r * slots + j)] = _dot(query, r * depth, vector, depth) + added
    for r in range(repeats):
        _softmax(scores, r * slots, slots)
    for j in range(slots):
        _widen(values, of_value + j * value_step, vector, value_depth, one)
        for r in range(repeats):
            _add_scaled(sums, r * value_depth, scores[np.uintp(r * slots + j)], vector, value_depth)
    for i in range(repeats * value_depth):
        _store(out, of_out + i, sums[np.uintp(i)])


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
            total = _multiply_add(a, rows[np.uintp(first + i)], sums[np.uintp(i)])
            total = _multiply_add(b, rows[np.uintp(first + step + i)], total)
            total = _multiply_add(c, rows[np.uintp(first + 2 * step + i)], total)
            sums[np.uintp(i)] = _multiply_add(d, rows[np.uintp(first + 3 * step + i)], total)
        j += 4
    while j < num_rows:
        for i in range(count):
            sums[np.uintp(i)] = _multiply_add(weights[at + j], rows[np.uintp(j * step + i)], sums[np.uintp(i)])
        j += 1


@njit
@no_type_check
def _attend_window(arrays, at, steps, sizes, scale) -> None:
    """Writes the attention outputs of several tokens at consecutive positions, for one key head and the query heads
    that share it, to `out`."""
    (q, keys, values, mask, out), (of_q, of_key, of_value, of_mask, of_out) = arrays, at
    (key_step, value_step, mask_step, token_step), (repeats, width, depth, value_depth, slots, start) = steps, sizes
    query, vector = np.empty(depth, np.float32), np.empty(depth, np.float32)
    turned, wide = np.empty(depth * slots, np.float32), np.empty(slots * value_depth, np.float32)
    one = np.float32(1.0)
    for j in range(slots):
        _widen(keys, of_key + j * key_step, vector, depth, one)
        for i in range(depth):
            turned[np.uintp(i * slots + j)] = vector[np.uintp(i)]
        for i in range(value_depth):
            wide[np.uintp(j * value_depth + i)] = _widened(values[np.uintp(of_value + j * value_step + i)])
    for r in range(repeats):
        for t in range(width):
            count = min(slots, start + t + 1)
            scores, sums = np.zeros(count, np.float32), np.zeros(value_depth, np.float32)
            _widen(q, of_q + (r * width + t) * depth, query, depth, scale)
            _add_products(query, 0, turned, slots, scores, (depth, count))
            for j in range(count):
                scores[np.uintp(j)] += _widened(mask[np.uintp(of_mask + r * mask_step + t * token_step + j)])
            _softmax(scores, 0, count)
            _add_products(scores, 0, wide, value_depth, sums, (count, value_depth))
            for i in range(value_depth):
                _store(out, of_out + (r * width + t) * value_depth + i, sums[np.uintp(i)])


@njit
@no_type_check
def _run(call, q, keys, values, mask, out) -> None:
    """Computes the attention of (request, key head) pairs, taken from a counter that all threads share, until no pair
    is left. call: the 22 numbers of `decode_attention`."""
    places = carray(_pointer(call[5]), (call[6], 5), np.int64)
    heads, groups, width, depth, value_depth = call[7], call[8], call[9], call[10], call[11]
    repeats, steps = heads // groups, (call[14], call[15], call[17], call[18])
    scale = np.float32(np.int64(call[19]).view(np.float64))
    while True:
        task = _fetch_and_increment(call.ctypes.data + 20 * 8)
        if task >= len(places) * groups:
            break
        row, to_keys, to_values, slots, start = places[task // groups]
        group = task % groups
        head = group * repeats
        at = (
            (row * heads + head) * width * depth, to_keys + group * call[12], to_values + group * call[13],
            row * call[16] + head * call[17], (row * heads + head) * width * value_depth,
        )  # fmt: skip
        sizes = (repeats, width, depth, value_depth, slots, start)
        if width == 1:
            _attend((q, keys, values, mask, out), at, steps, sizes, scale)
        else:
            _attend_window((q, keys, values, mask, out), at, steps, sizes, scale)
        _fetch_and_increment(call.ctypes.data + 21 * 8)


def _compiled(function: Callable[..., None]) -> CFunc:
    """Returns a function compiled by numba as a CFunc, which can be called by address."""
    try:
        return cfunc(types.void(types.voidptr), cache=True)(function)
    except RuntimeError:
        return cfunc(types.void(types.voidptr))(function)


@_compiled
@no_type_check
def work_on_float32(data) -> None:
    """Runs in one thread of a float32 attention call: computes (request, key head) pairs until none is left. data:
    address of the 22 whole numbers from `decode_attention`."""
    call = carray(data, (22,), np.int64)
    q, keys = carray(_pointer(call[0]), (1,), np.float32), carray(_pointer(call[1]), (1,), np.float32)
    values, mask = carray(_pointer(call[2]), (1,), np.float32), carray(_pointer(call[3]), (1,), np.float32)
    _run(call, q, keys, values, mask, carray(_pointer(call[4]), (1,), np.float32))


@_compiled
@no_type_check
def work_on_bfloat16(data) -> None:
    """Runs in one thread of a bfloat16 attention call, as `work_on_float32` does in float32. bfloat16 is read as 16-bit
    integers, since numba lacks that type."""
    call = carray(data, (22,), np.int64)
    q, keys = carray(_pointer(call[0]), (1,), np.uint16), carray(_pointer(call[1]), (1,), np.uint16)
    values, mask = carray(_pointer(call[2]), (1,), np.uint16), carray(_pointer(call[3]), (1,), np.uint16)
    _run(call, q, keys, values, mask, carray(_pointer(call[4]), (1,), np.uint16))
