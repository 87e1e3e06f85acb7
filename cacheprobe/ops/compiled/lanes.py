"""Builds the innermost loop of a matrix product from LLVM's vector instructions, for functions that numba compiles.

Sums have one order, whatever the number of rows, outputs or threads: sum l of a register takes every l-th number, and
at the end the second half of the sums is added to the first half, until one number is left.
"""

from typing import Any, NamedTuple, no_type_check

import torch
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

FLOATS, PAIRS, TILES = 0, 1, 2
"""Kinds of innermost loop: fused multiply-adds of float32; dot products of pairs of bfloat16 (AVX512-BF16); products of
tiles of bfloat16 (AMX)."""

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""Formats of a result."""

FORMATS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Format of the loops, by dtype of the tensors."""

OUTPUTS = 4
"""Number of outputs (rows of the weight) that one innermost loop computes together."""

LANES = 16 if torch.cpu.get_capabilities().get("avx512_f") else 8
"""Number of float32 sums in a register."""

ROWS = LANES // OUTPUTS
"""Number of rows that one innermost loop computes together: as many sums as one register holds are folded at once."""

KINDS = {FLOATS: "float32", PAIRS: "pairs of bfloat16", TILES: "tiles of bfloat16"}
"""Text for each kind."""

INNER_STEP = {FLOATS: LANES, PAIRS: 32, TILES: 32}
"""Number of products that a row and an output take in one step, by kind. The inner dimension must be a multiple."""

Emitted = Any
"""A value in LLVM's code."""

_INT, _WORD, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_SUMS, _WORDS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_WORD, LANES)


class _BFloat(ir.types._BaseFloatType):  # pyright: ignore[reportAttributeAccessIssue]
    """Is LLVM's type bfloat, which llvmlite does not define."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: object) -> str:
        """Raises: NotImplementedError, since no constant of this type is used."""
        raise NotImplementedError("constants of bfloat are not used")


_BFloat._create_instance()
_STORED = {FLOATS: (_SUMS, 4), PAIRS: (ir.VectorType(_BFloat(), 32), 2)}
"""Type of one register of numbers, and bytes of one number, by kind."""


class TilePlaces(NamedTuple):
    """Holds where a tile's numbers lie, as LLVM values."""

    values: Emitted
    """Address of the first row's numbers."""
    value_step: Emitted
    """Bytes from one row to the next; so are the other steps."""
    weight: Emitted
    weight_step: Emitted
    inner: Emitted
    """Products of one sum: a multiple of INNER_STEP."""
    bias: Emitted
    """Address of one float32 number for each output."""
    out: Emitted
    out_step: Emitted


@intrinsic(prefer_literal=True)
@no_type_check
def multiply_tile(_typing, kind, format, rows, outputs, fetches, places):
    """Computes a tile of values weight^T + bias, and stores it, rounded to nearest, ties to even.

    kind, format, rows, outputs, fetches: constants; without effect if kind is TILES. `outputs` is OUTPUTS or 1.
    fetches: 1 to load the weights of the next outputs into the processor's cache meanwhile, else 0.  places: addresses
    and sizes of the `TilePlaces`, all int64, in this order.
    """
    # numba calls this while it compiles, so each argument is a type; None refuses a call without literal constants
    literals = kind, format, rows, outputs, fetches
    if not all(isinstance(one, types.IntegerLiteral) for one in literals):
        return None
    shape = tuple(one.literal_value for one in literals)

    def make(context, builder, _signature, args):
        """Emits LLVM code for the tile."""
        numbers = cgutils.unpack_tuple(builder, args[5], len(places))  # args[5] holds the LLVM values of `places`
        if kind.literal_value != TILES:  # numba compiles branches that are never taken
            pairs = zip(numbers, places, strict=True)
            as_int64 = [context.cast(builder, number, its_type, types.int64) for number, its_type in pairs]
            _emit(builder, shape, TilePlaces(*as_int64))
        return context.get_dummy_value()

    return types.void(*literals, places), make


def _emit(builder: ir.IRBuilder, shape: tuple[int, int, int, int, int], places: "TilePlaces") -> None:
    kind, format, rows, outputs, fetches = shape
    values, value_step, weight, weight_step, inner, bias, out, out_step = places
    register, size = _STORED[kind]
    before, loop, end = builder.block, builder.append_basic_block("inner"), builder.append_basic_block("fold")
    zero = ir.Constant(_SUMS, [0.0] * LANES)
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_INT)
    at.add_incoming(_INT(0), before)
    sums = [builder.phi(_SUMS) for _ in range(rows * outputs)]

    def address(base: Emitted, step: Emitted, number: int) -> Emitted:
        """Emits the address of the bytes `at` of row `number`."""
        return builder.add(builder.add(base, at), builder.mul(step, _INT(number)))

    def load(base: Emitted, step: Emitted, number: int) -> Emitted:
        """Emits the load of one register of row `number`, at the bytes `at`."""
        return builder.load(builder.inttoptr(address(base, step, number), register.as_pointer()), align=size)

    for o in range(outputs if fetches else 0):
        _fetch(builder, address(weight, weight_step, outputs + o))
    of_outputs = [load(weight, weight_step, o) for o in range(outputs)]
    new = []
    for r in range(rows):
        value = load(values, value_step, r)
        new += [_multiply_add(builder, kind, value, w, sums[r * outputs + o]) for o, w in enumerate(of_outputs)]
    after = builder.add(at, _INT(INNER_STEP[kind] * size))
    at.add_incoming(after, loop)
    for one, added in zip(sums, new, strict=True):
        one.add_incoming(zero, before)
        one.add_incoming(added, loop)
    builder.cbranch(builder.icmp_signed("<", after, builder.mul(inner, _INT(size))), loop, end)
    builder.position_at_end(end)
    count = 1 << (len(new) - 1).bit_length()
    step, results = LANES // count, folded(builder, new + [zero] * (count - len(new)))
    added = builder.load(builder.inttoptr(bias, ir.VectorType(_FLOAT, outputs).as_pointer()), align=4)
    lanes = lanes_of([i // step % outputs for i in range(LANES)])
    results = in_format(builder, builder.fadd(results, builder.shuffle_vector(added, added, lanes)), format)
    for r in range(rows):
        row = builder.shuffle_vector(results, results, lanes_of([(r * outputs + o) * step for o in range(outputs)]))
        place = builder.inttoptr(builder.add(out, builder.mul(out_step, _INT(r))), row.type.as_pointer())
        builder.store(row, place, align=4 if format == FLOAT32 else 2)


def _fetch(builder: ir.IRBuilder, address: Emitted) -> None:
    """Emits a hint to load the bytes at an address into the processor's cache."""
    byte, name = ir.IntType(8).as_pointer(), "llvm.prefetch.p0i8"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [byte, _WORD, _WORD, _WORD]), name)
    builder.call(function, [builder.inttoptr(address, byte), _WORD(0), _WORD(3), _WORD(1)])  # to read, keep, data


def _multiply_add(builder: ir.IRBuilder, kind: int, a: Emitted, b: Emitted, total: Emitted) -> Emitted:
    """Emits total + a * b, lane by lane (of each lane's pair, for PAIRS), each product and sum rounded as the
    instruction does."""
    register = _STORED[kind][0]
    if kind == FLOATS:
        return call_on_lanes(builder, "fma", a, b, total)
    name, of = "llvm.x86.avx512bf16.dpbf16ps.512", ir.FunctionType(_SUMS, [_SUMS, register, register])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, of, name), [total, a, b])


def call_on_lanes(builder: ir.IRBuilder, name: str, *registers: Emitted) -> Emitted:
    """Emits a function of LLVM, such as fma, on registers of float32 numbers, lane by lane."""
    name, of = f"llvm.{name}.v{LANES}f32", ir.FunctionType(_SUMS, [_SUMS] * len(registers))
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, of, name), registers)


def folded(builder: ir.IRBuilder, sums: list[Emitted]) -> Emitted:
    """Emits the fold of n registers, a power of two up to LANES, into one: its lane i LANES / n holds the sum of the
    lanes of register i. The second half of the lanes is added to the first half, until one is left."""
    size = LANES // 2
    while size:  # lane i of a pair's sum: of the second register if i has the bit `size`, else of the first
        kept, moved = (lanes_of([(i ^ flip) + LANES * bool(i & size) for i in range(LANES)]) for flip in (0, size))
        half = (len(sums) + 1) // 2
        pairs = zip(sums[:half], sums[-half:], strict=True)
        sums = [builder.fadd(builder.shuffle_vector(a, b, kept), builder.shuffle_vector(a, b, moved)) for a, b in pairs]
        size //= 2
    return sums[0]


def in_format(builder: ir.IRBuilder, sums: Emitted, format: int) -> Emitted:
    """Emits the conversion of float32 numbers into a format; bfloat16 as 16-bit integers."""
    if format == FLOAT32:
        return sums
    if format == FLOAT16:
        return builder.fptrunc(sums, ir.VectorType(ir.HalfType(), LANES))
    words = builder.bitcast(sums, _WORDS)
    odd = builder.and_(builder.lshr(words, _all(16)), _all(1))
    rounded = builder.lshr(builder.add(builder.add(words, _all(0x7FFF)), odd), _all(16))
    is_number = builder.fcmp_ordered("ord", sums, sums)
    return builder.trunc(builder.select(is_number, rounded, _all(0x7FC0)), ir.VectorType(ir.IntType(16), LANES))


def lanes_of(numbers: list[int]) -> Emitted:
    """Returns a constant register of whole numbers."""
    return ir.Constant(ir.VectorType(_WORD, len(numbers)), numbers)


def _all(number: int) -> Emitted:
    return ir.Constant(_WORDS, [number] * LANES)
