"""Builds products of bfloat16 from the instructions of a processor's matrix units (Intel's AMX), for functions that
numba compiles.

A tile holds the sums of 16 outputs and 16 rows. An instruction adds 32 products to each sum: those at even and at odd
places are added apart, then together, then to the sum, whatever the other rows and outputs are. Denormal numbers count
as zero, whatever `torch.set_flush_denormal` says.
"""

import ctypes
import errno
import os
from typing import Any, NamedTuple, no_type_check

from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils
from numba.extending import intrinsic

from cacheprobe.ops.compiled.lanes import FLOAT32, TILES, Emitted, in_format, lanes_of

SIDE = 16
"""Rows, and outputs, of a tile of sums."""

_VALUE_BYTES = 2 * SIDE
"""Bytes of one number of 16 packed rows."""

_STEP_BYTES = 64
"""Bytes of a row that one instruction takes: 32 numbers."""

_BYTE, _WORD, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS = ir.VectorType(_FLOAT, SIDE)
_SIGNATURES = {
    "ldtilecfg": [_BYTE.as_pointer()],
    "tilerelease": [],
    "tilezero": [_BYTE],
    "tileloadd64": [_BYTE, _BYTE.as_pointer(), _LONG],
    "tilestored64": [_BYTE, _BYTE.as_pointer(), _LONG],
    "tdpbf16ps": [_BYTE] * 3,
}
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
"""Linux on x86-64: number of the call arch_prctl, its request ARCH_REQ_XCOMP_PERM, and the part XTILEDATA."""

_VALUES, _WEIGHTS = 6, 4
"""First tile of values, and of weights; the sums are tiles 0 to 3."""


class PackedPlaces(NamedTuple):
    """Holds where the numbers of a product lie, as LLVM values. Steps are in bytes."""

    values: Emitted
    """Address of 16 packed rows: for each pair of numbers of the inner dimension, the pair of each row."""
    value_step: Emitted
    """From 16 packed rows to the next 16."""
    weight: Emitted
    weight_step: Emitted
    inner: Emitted
    """Products of one sum: a multiple of 32."""
    bias: Emitted
    """Address of the first output's float32 number."""
    bias_step: Emitted
    out: Emitted
    out_step: Emitted
    rows: Emitted
    """How many of the packed rows have a place in `out`; the others are padding."""


def refusal_of_tiles() -> str:
    """Asks Linux to let the threads of this process use the matrix units: without its permission an instruction of
    theirs ends the process. Returns "" if they may, otherwise the reason that Linux gives."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        refused = library.syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) != 0
    except (AttributeError, OSError, TypeError):  # not Linux
        return "it is not Linux"
    if not refused:
        return ""
    if (number := ctypes.get_errno()) == errno.ENOSPC:
        return "a thread's alternate signal stack is too small"
    return os.strerror(number)


def require_tiles(kind: int) -> None:
    """Asks for the matrix units if `kind` is TILES. Raises: RuntimeError if Linux refuses them."""
    if kind == TILES and (reason := refusal_of_tiles()):
        raise RuntimeError(f"the operating system refused this process the processor's matrix units: {reason}")


def _literals(*given: Any) -> list[int] | None:
    return [one.literal_value for one in given] if all(isinstance(one, types.IntegerLiteral) for one in given) else None


@intrinsic(prefer_literal=True)
@no_type_check
def use_tiles(_typing, kind, starts):
    """Configures the matrix units of this thread for tiles of 16 x 64 bytes (`starts`=1), or frees them (0), if `kind`
    is TILES; for other kinds there is nothing to do."""
    literals = _literals(kind, starts)
    if literals is None:
        return None

    def make(context, builder, _signature, _args):
        """Emits LLVM code that loads or releases the configuration."""
        if literals[0] == TILES and literals[1]:
            palette = [1, *[0] * 15, *[_STEP_BYTES, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8]
            of = ir.ArrayType(_BYTE, len(palette))
            place = cgutils.alloca_once(builder, of)
            builder.store(ir.Constant(of, palette), place)
            _call(builder, "ldtilecfg", builder.bitcast(place, _BYTE.as_pointer()))
        elif literals[0] == TILES:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(kind, starts), make


@intrinsic(prefer_literal=True)
@no_type_check
def multiply_packed(_typing, kind, format, outputs, blocks, places):
    """Computes values weight^T + bias for 16 times `outputs` outputs and 16 times `blocks` packed rows, rounded to
    nearest, ties to even. `outputs`=0: for one output.

    kind, format, outputs, blocks: constants; without effect if kind is not TILES.  places: addresses and sizes of the
    `PackedPlaces`, all int64, in this order.
    """
    literals = kind, format, outputs, blocks
    shape = _literals(*literals)
    if shape is None:
        return None

    def make(context, builder, _signature, args):
        """Emits LLVM code for the tiles."""
        if shape[0] == TILES:
            given = zip(cgutils.unpack_tuple(builder, args[4], len(places)), places, strict=True)
            where = PackedPlaces(*(context.cast(builder, one, of, types.int64) for one, of in given))
            _emit(builder, shape[1], shape[2], shape[3], where)
        return context.get_dummy_value()

    return types.void(*literals, places), make


def _call(builder: ir.IRBuilder, name: str, *args: Emitted) -> None:
    full = f"llvm.x86.{name}"
    of = ir.FunctionType(ir.VoidType(), _SIGNATURES[name])
    builder.call(builder.module.globals.get(full) or ir.Function(builder.module, of, full), args)


def _emit(builder: ir.IRBuilder, format: int, outputs: int, blocks: int, places: PackedPlaces) -> None:
    before, loop, end = builder.block, builder.append_basic_block("inner"), builder.append_basic_block("store")
    scratch = cgutils.alloca_once(builder, ir.ArrayType(_SUMS, SIDE))
    scratch = builder.bitcast(scratch, _BYTE.as_pointer())
    tiles = [(o, b, _BYTE(o * blocks + b)) for o in range(max(1, outputs)) for b in range(blocks)]
    for *_, sums in tiles:
        _call(builder, "tilezero", sums)
    builder.branch(loop)
    builder.position_at_end(loop)
    at = builder.phi(_LONG)
    at.add_incoming(_LONG(0), before)
    values = builder.add(places.values, builder.mul(at, _LONG(SIDE)))
    for b in range(blocks):
        _load(builder, _VALUES + b, _row(builder, values, places.value_step, b), _LONG(_STEP_BYTES))
    weight = builder.add(places.weight, at)
    for o in range(max(1, outputs)):
        step = places.weight_step if outputs else _LONG(0)
        _load(builder, _WEIGHTS + o % 2, _row(builder, weight, places.weight_step, SIDE * o), step)
        for _, b, sums in tiles[o * blocks : (o + 1) * blocks]:
            _call(builder, "tdpbf16ps", sums, _BYTE(_WEIGHTS + o % 2), _BYTE(_VALUES + b))
    after = builder.add(at, _LONG(_STEP_BYTES))
    at.add_incoming(after, builder.block)
    builder.cbranch(builder.icmp_signed("<", after, builder.mul(places.inner, _LONG(2))), loop, end)
    builder.position_at_end(end)
    for o, b, sums in tiles:
        _call(builder, "tilestored64", sums, scratch, _LONG(_STEP_BYTES))
        _store(builder, format, SIDE if outputs else 1, scratch, places, o, b)


def _load(builder: ir.IRBuilder, tile: int, address: Emitted, step: Emitted) -> None:
    _call(builder, "tileloadd64", _BYTE(tile), builder.inttoptr(address, _BYTE.as_pointer()), step)


def _row(builder: ir.IRBuilder, base: Emitted, step: Emitted, number: int) -> Emitted:
    """Emits the address of row `number`."""
    return builder.add(base, builder.mul(step, _LONG(number)))


def _store(
    builder: ir.IRBuilder, format: int, width: int, scratch: Emitted, places: PackedPlaces, o: int, b: int
) -> None:
    """Emits the bias, the transposition from [outputs, rows] to [rows, outputs], the rounding and the store of the
    first `width` outputs of each row that has a place."""
    size = 4 if format == FLOAT32 else 2
    by_output = []
    for i in range(SIDE if width > 1 else 1):
        place = builder.gep(scratch, [_LONG(_STEP_BYTES * i)])
        sums = builder.load(builder.bitcast(place, _SUMS.as_pointer()), align=4)
        address = _row(builder, places.bias, places.bias_step, SIDE * o + i)
        added = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=4)
        spread = builder.insert_element(ir.Constant(_SUMS, ir.Undefined), added, _WORD(0))
        by_output.append(builder.fadd(sums, builder.shuffle_vector(spread, spread, lanes_of([0] * SIDE))))
    rows = _transposed(builder, by_output) if width > 1 else by_output
    for r in range(SIDE):
        with builder.if_then(builder.icmp_signed("<", _LONG(SIDE * b + r), places.rows)):
            at = builder.add(_row(builder, places.out, places.out_step, SIDE * b + r), _LONG(size * SIDE * o))
            made = in_format(builder, rows[r if width > 1 else 0], format)
            made = made if width > 1 else builder.extract_element(made, _WORD(r))
            builder.store(made, builder.inttoptr(at, made.type.as_pointer()), align=size)


def _transposed(builder: ir.IRBuilder, rows: list[Emitted]) -> list[Emitted]:
    """Emits the transposition of 16 registers of 16 numbers: pairs of registers exchange blocks of 8, 4, 2 and 1
    numbers."""
    size = SIDE // 2
    while size:
        kept = lanes_of([i if not i & size else SIDE + (i ^ size) for i in range(SIDE)])
        moved = lanes_of([i | size if not i & size else SIDE + i for i in range(SIDE)])
        new = list(rows)
        for i in range(SIDE):
            if not i & size:
                a, b = rows[i], rows[i | size]
                new[i], new[i | size] = builder.shuffle_vector(a, b, kept), builder.shuffle_vector(a, b, moved)
        rows, size = new, size // 2
    return rows
