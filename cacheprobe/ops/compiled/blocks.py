"""Builds the reading of one block of logits from LLVM's vector instructions, for functions that numba compiles.

numba's own code for these loops takes registers of half the width, and calls functions that count references.
"""

from typing import no_type_check

from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

from cacheprobe.ops.compiled.lanes import LANES, Emitted, call_on_lanes, folded, lanes_of

BLOCK = 128
"""Number of logits in a block."""

LOWEST = -87.0
"""exp of less counts as zero."""

_WORDS, _SUMS = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(ir.FloatType(), LANES)
_STARTS = range(0, BLOCK, LANES)


@intrinsic
@no_type_check
def widen_block(_typing, stored, _at, wide, _to):
    """Converts the block of stored logits that begins at index `at` to float32, into array `wide` from index `to` on.
    Returns the largest logit; any number if one is NaN."""

    def make(context, builder, signature, args):
        """Emits LLVM code for the block."""
        source, target = (_address(context, builder, signature, args, which) for which in (0, 2))
        best = None
        for start in _STARTS:
            x = _load_wide(builder, source, stored.dtype, start)
            builder.store(x, _at_lane(builder, target, _SUMS, start), align=4)
            best = x if best is None else _larger(builder, best, x)
        size = LANES // 2
        while size:
            best = _larger(
                builder, best, builder.shuffle_vector(best, best, lanes_of([i ^ size for i in range(LANES)]))
            )
            size //= 2
        return builder.extract_element(best, ir.IntType(32)(0))

    return types.float32(stored, types.int64, wide, types.int64), make


@intrinsic
@no_type_check
def sum_block(_typing, wide, _at, _best):
    """Returns the sums of exp(x - best) and of exp(x - best) (x - best) of a block of array `wide`, and whether a
    logit is NaN. The sums have the order of `basics.fold_sum`."""
    made = types.Tuple((types.float32, types.float32, types.boolean))

    def make(context, builder, signature, args):
        """Emits LLVM code for the block."""
        source, best = _address(context, builder, signature, args, 0), _all(builder, args[2])
        is_nan = []

        def sums_of(start: int, step: int) -> tuple[Emitted, Emitted]:
            """Emits the two sums of every `step`-th register from `start` on: the second half is added to the first."""
            if step == len(_STARTS):
                x = builder.load(_at_lane(builder, source, _SUMS, start * LANES), align=4)
                is_nan.append(builder.fcmp_unordered("uno", x, x))
                shifted = _larger(builder, builder.fsub(x, best), _floats(LOWEST))
                weight = _exponential(builder, shifted)
                return weight, builder.fmul(weight, shifted)
            both = zip(sums_of(start, 2 * step), sums_of(start + step, 2 * step), strict=True)
            return tuple(builder.fadd(a, b) for a, b in both)

        sums = folded(builder, [*sums_of(0, 1)])
        while len(is_nan) > 1:
            is_nan = [builder.or_(is_nan[0], is_nan[1]), *is_nan[2:]]
        bits = builder.bitcast(is_nan[0], ir.IntType(LANES))
        parts = [builder.extract_element(sums, ir.IntType(32)(i)) for i in (0, LANES // 2)]
        found = builder.zext(builder.icmp_unsigned("!=", bits, bits.type(0)), context.get_value_type(types.boolean))
        return context.make_tuple(builder, made, (*parts, found))

    return made(wide, types.int64, types.float32), make


@intrinsic
@no_type_check
def count_block(_typing, wide, _at, _value, _counts_equal):
    """Returns how many logits of a block of array `wide` are larger than `value`, or equal if `counts_equal`."""

    def make(context, builder, signature, args):
        """Emits LLVM code for the block."""
        source, value, total = _address(context, builder, signature, args, 0), _all(builder, args[2]), None
        for start in _STARTS:
            x = builder.load(_at_lane(builder, source, _SUMS, start), align=4)
            larger, equal = builder.fcmp_ordered(">", x, value), builder.fcmp_ordered("==", x, value)
            counted = builder.or_(larger, builder.and_(equal, _all(builder, args[3])))
            number = builder.ctpop(builder.bitcast(counted, ir.IntType(LANES)))
            total = number if total is None else builder.add(total, number)
        return builder.zext(total, ir.IntType(64))

    return types.int64(wide, types.int64, types.float32, types.boolean), make


def _address(context: Emitted, builder: ir.IRBuilder, signature: Emitted, args: Emitted, which: int) -> Emitted:
    """Emits the address of the number of array `which` at the index that follows it."""
    array = context.make_array(signature.args[which])(context, builder, args[which])
    return cgutils.gep_inbounds(builder, array.data, args[which + 1])


def _at_lane(builder: ir.IRBuilder, address: Emitted, register: ir.Type, number: int) -> Emitted:
    """Emits the address of the register that begins `number` numbers after an address."""
    return builder.bitcast(cgutils.gep_inbounds(builder, address, number), register.as_pointer())


def _load_wide(builder: ir.IRBuilder, address: Emitted, dtype: types.Type, number: int) -> Emitted:
    """Emits the load of a register of stored numbers, as float32: `basics.widened`."""
    if dtype == types.float32:
        return builder.load(_at_lane(builder, address, _SUMS, number), align=4)
    if dtype == types.int16:
        return builder.fpext(
            builder.load(_at_lane(builder, address, ir.VectorType(ir.HalfType(), LANES), number), align=2), _SUMS
        )
    stored = builder.load(_at_lane(builder, address, ir.VectorType(ir.IntType(16), LANES), number), align=2)
    return builder.bitcast(builder.shl(builder.zext(stored, _WORDS), lanes_of([16] * LANES)), _SUMS)


def _larger(builder: ir.IRBuilder, a: Emitted, b: Emitted) -> Emitted:
    """Emits the larger numbers of two registers, lane by lane; b where one is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exponential(builder: ir.IRBuilder, x: Emitted) -> Emitted:
    """Emits exp(x) for x from LOWEST to 0, with the bits of `basics.exponential`."""

    def fma(a: Emitted, b: Emitted, c: Emitted) -> Emitted:
        return call_on_lanes(builder, "fma", a, b, c)

    n = call_on_lanes(builder, "floor", fma(x, _floats(1.44269504088896341), _floats(0.5)))
    r = fma(n, _floats(2.12194440e-4), fma(n, _floats(-0.693359375), x))
    p = _floats(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = fma(p, r, _floats(factor))
    p = builder.fadd(fma(p, builder.fmul(r, r), r), _floats(1.0))
    exponent = builder.add(builder.fptosi(n, _WORDS), lanes_of([127] * LANES))
    return builder.fmul(p, builder.bitcast(builder.shl(exponent, lanes_of([23] * LANES)), _SUMS))


def _all(builder: ir.IRBuilder, number: Emitted) -> Emitted:
    """Emits a register that holds one number in every lane."""
    one = builder.insert_element(
        ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined), number, ir.IntType(32)(0)
    )
    return builder.shuffle_vector(one, one, lanes_of([0] * LANES))


def _floats(number: float) -> Emitted:
    return ir.Constant(_SUMS, [number] * LANES)
