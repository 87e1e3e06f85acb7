"""Defines the small functions that numba's loops share: addresses, a counter for threads, bfloat16, exp, sums.

No function allows the compiler to reorder sums or to join a product and a sum (flags reassoc and contract of fastmath):
LLVM then chooses by the order of names, which Python's hash seed changes, so two processes would compile other bits.

Indices are cast to unsigned numbers in the loops: numba would otherwise let negative indices count from the end, which
makes loops slow.
"""

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, no_type_check

import llvmlite
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, config, njit, types  # pyright: ignore[reportPrivateImportUsage]
from numba.core.ccallback import CFunc
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload
from numpy.typing import NDArray

if config.DISABLE_JIT:  # pyright: ignore[reportAttributeAccessIssue]
    raise ImportError("NUMBA_DISABLE_JIT is set, but cacheprobe's loops must be compiled; unset NUMBA_DISABLE_JIT")

_TARGET = cpu_target.target_context.codegen().magic_tuple()  # pyright: ignore[reportAttributeAccessIssue]
"""Target triple of the compiler, the processor, and the processor's features."""

FEATURES = frozenset(_TARGET[2].split(","))
"""Features for which the compiler makes code, such as "+avx2"."""

COMPILER = (
    f"numba {numba.__version__}, llvmlite {llvmlite.__version__}, {_TARGET[1]} "
    f"{hashlib.sha256(repr(_TARGET).encode()).hexdigest()[:8]}"
)
"""Text in the schedule fingerprint: other versions, processors and features may give other bits."""

SOURCES = hashlib.sha256(
    b"\0".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()[:12]
"""Hash of the files that define the loops: after a change of one, no loop is taken from numba's cache."""

_PAUSES = 4096
"""A waiting thread gives way to others once in so many looks, which take about .1 ms."""

STORED = (np.float32, np.uint16, np.int16)
"""numpy's dtype for the bits of each format (lanes.FLOAT32, BFLOAT16, FLOAT16): numba reads no 16-bit floats."""


@intrinsic
@no_type_check
def pointer(_typing, _address):
    """Converts an address, given as a whole number, into a pointer."""

    def make(context, builder, signature, args):
        """Emits LLVM code that converts the address."""
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), make


@intrinsic
@no_type_check
def fetch_and_increment(_typing, _address):
    """Returns the whole number at an address and adds one to it in memory, atomically: no two threads get the same
    number."""

    def make(_context, builder, _signature, args):
        """Emits LLVM code for the atomic increment."""
        number = args[0].type
        at = builder.inttoptr(args[0], number.as_pointer())
        return builder.atomic_rmw("add", at, number(1), "acq_rel")

    return types.int64(types.int64), make


@intrinsic
@no_type_check
def number_at(_typing, _address):
    """Returns the whole number at an address. What another thread wrote before it increased the number is visible
    afterwards."""

    def make(_context, builder, _signature, args):
        """Emits LLVM code for the atomic load."""
        return builder.load_atomic(builder.inttoptr(args[0], args[0].type.as_pointer()), "acquire", 8)

    return types.int64(types.int64), make


@intrinsic
@no_type_check
def _pause(_typing):
    """Tells the processor that a thread waits in a loop."""

    def make(context, builder, _signature, _args):
        """Emits LLVM code for the instruction."""
        builder.call(_function(builder.module, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), [])), [])
        return context.get_dummy_value()

    return types.void(), make


@intrinsic
@no_type_check
def _give_way(_typing):
    """Lets another thread of the machine run on this thread's core."""

    def make(_context, builder, _signature, _args):
        """Emits LLVM code for the call of the C library's sched_yield."""
        return builder.call(_function(builder.module, "sched_yield", ir.FunctionType(ir.IntType(32), [])), [])

    return types.int32(), make


def _function(module: ir.Module, name: str, of: ir.FunctionType) -> ir.Function:
    return module.globals.get(name) or ir.Function(module, of, name)


@njit
@no_type_check
def wait_until(address, number) -> None:
    """Waits until the whole number at an address is at least `number`."""
    times = 0
    while number_at(address) < number:
        times += 1
        if times % _PAUSES:
            _pause()
        else:
            _give_way()


@intrinsic
@no_type_check
def _from_float16_bits(_typing, _bits):
    """Returns a float16 number, given as its 16 bits, as float32."""

    def make(_context, builder, _signature, args):
        """Emits LLVM code for the conversion."""
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), make


@no_type_check
def widened(stored):
    """Returns a stored number as float32. uint16: the bits of a bfloat16, the upper half of a float32; int16: the bits
    of a float16."""
    raise NotImplementedError("numba compiles the version below")


@overload(widened, inline="always")
@no_type_check
def _(stored):
    def unchanged(stored):
        """Returns a float32 number unchanged."""
        return stored

    def from_bfloat16_bits(stored):
        """Returns a bfloat16 number, given as its 16 bits, as float32."""
        return np.uint32(np.uint32(stored) << np.uint32(16)).view(np.float32)

    def from_float16_bits(stored):
        """Returns a float16 number, given as its 16 bits, as float32."""
        return _from_float16_bits(stored)  # pyright: ignore[reportCallIssue]

    if stored == types.float32:
        return unchanged
    return from_float16_bits if stored == types.int16 else from_bfloat16_bits


@intrinsic
@no_type_check
def _to_float16_bits(_typing, _value):
    """Rounds a float32 number to float16, and returns its 16 bits."""

    def make(_context, builder, _signature, args):
        """Emits LLVM code for the conversion."""
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), make


@no_type_check
def narrowed(value, like):
    """Returns a float32 number as the numbers of array `like` are stored, rounded to nearest, ties to even."""
    raise NotImplementedError("numba compiles the version below")


@overload(narrowed)
@no_type_check
def _(value, like):
    def unchanged(value, like):
        """Returns a float32 number unchanged."""
        return value

    def to_bfloat16_bits(value, like):
        """Rounds a float32 number to bfloat16, and returns its 16 bits."""
        word = np.float32(value).view(np.uint32)
        # adds just under half of the last kept bit, and that bit, so that ties go to even; 0x7FC0 is a NaN
        rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.uint16(0x7FC0) if np.isnan(value) else np.uint16(rounded)

    def to_float16_bits(value, like):
        """Rounds a float32 number to float16, and returns its 16 bits."""
        return _to_float16_bits(value)  # pyright: ignore[reportCallIssue]

    if like.dtype == types.float32:
        return unchanged
    return to_float16_bits if like.dtype == types.int16 else to_bfloat16_bits


@intrinsic
@no_type_check
def multiply_add(_typing, _a, _b, _c):
    """Returns a * b + c of float32 numbers, rounded once."""

    def make(_context, builder, _signature, args):
        """Emits LLVM code for the fused multiplication and addition."""
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), make


@njit(inline="always")
@no_type_check
def exponential(x):
    """Returns exp(x) for float32 x up to 0, to two units in the last place (Cephes' expf); zero for x below -87."""
    is_low = x < np.float32(-87.0)
    x = max(x, np.float32(-87.0))
    n = np.floor(multiply_add(x, np.float32(1.44269504088896341), np.float32(0.5)))
    r = multiply_add(n, np.float32(2.12194440e-4), multiply_add(n, np.float32(-0.693359375), x))
    p = multiply_add(np.float32(1.9875691500e-4), r, np.float32(1.3981999507e-3))
    p = multiply_add(p, r, np.float32(8.3334519073e-3))
    p = multiply_add(p, r, np.float32(4.1665795894e-2))
    p = multiply_add(p, r, np.float32(1.6666665459e-1))
    p = multiply_add(p, r, np.float32(5.0000001201e-1))
    p = multiply_add(p, np.float32(r * r), r) + np.float32(1.0)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.float32(0.0) if is_low else p * power


@njit(inline="always")
@no_type_check
def soft_capped(x, cap):
    """Returns cap * tanh(x / cap) of float32 numbers, to two units in the last place of `cap`."""
    power = exponential(np.float32(-2.0) * abs(np.float32(x / cap)))
    size = np.float32((np.float32(1.0) - power) / (np.float32(1.0) + power))
    capped = np.float32(cap * (size if x >= np.float32(0.0) else -size))
    return x if np.isnan(x) else capped


@njit
@no_type_check
def fold_sum(values, count):
    """Returns the sum of the first `count` numbers of `values`, which are overwritten: the second half is added to the
    first half until one number is left."""
    while count > 1:
        half = (count + 1) // 2
        for i in range(count - half):
            values[np.uintp(i)] += values[np.uintp(half + i)]
        count = half
    return values[0] if count else np.float32(0.0)


@njit(fastmath={"nnan", "nsz"})
@no_type_check
def largest(values, at, count):
    """Returns the largest of the numbers [at, at + count), in whatever order they are compared."""
    best = values[np.uintp(at)]
    for j in range(1, count):
        best = max(best, values[np.uintp(at + j)])
    return best


def work(function: Callable[..., None]) -> CFunc:
    """Compiles a function of one address so that C code can call it. The result is cached on disk if numba has a folder
    to write to."""
    return _cached(partial(cfunc, types.void(types.voidptr)), function)


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compiles a function for Python at its first call; cached as `work` does."""
    return _cached(njit, function)


def _cached(compiler: Callable[..., Any], function: Callable[..., None]) -> Any:
    function.__qualname__ += f"_{SOURCES}"  # numba names its files by this, and looks at no file that is imported
    try:
        return compiler(cache=True)(function)
    except RuntimeError:
        return compiler()(function)


def run_on_threads(compiled: CFunc, call: NDArray[np.int64], is_little: bool = False) -> None:
    """Runs `compiled` with the address of the int64 array `call`: on the threads of torch's own operations, or on this
    thread alone if there is little work or no OpenMP library of torch's."""
    start = find_thread_runner()
    if start is None or is_little:
        compiled.ctypes(call.ctypes.data)
    else:
        start(compiled.address, call.ctypes.data, torch.get_num_threads(), 0)


@cache
def find_thread_runner() -> "Callable[[int | None, int, int, int], None] | None":
    """Returns OpenMP's function GOMP_parallel, which runs a function on the threads of torch's own operations; None if
    torch's lib folder has no libgomp.

    A separate thread pool of numba would compete with torch's threads, which wait by spinning.
    """
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        start = ctypes.CDLL(str(path)).GOMP_parallel
        start.argtypes, start.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return start
    return None
