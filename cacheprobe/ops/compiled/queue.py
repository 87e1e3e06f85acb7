"""Queues operations of a forward on a CPU, and computes the queue in one call of loops that numba compiles."""

from collections.abc import Sequence
from functools import cache
from struct import Struct

import numpy as np
import torch
from numba.core.ccallback import CFunc
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from cacheprobe.ops.compiled import queue_loops
from cacheprobe.ops.compiled.attention import attention_call, store_call
from cacheprobe.ops.compiled.basics import run_on_threads
from cacheprobe.ops.compiled.lanes import FLOATS, FORMATS, INNER_STEP, KINDS, OUTPUTS, PAIRS, ROWS, TILES
from cacheprobe.ops.compiled.queue_loops import NUMBERS, NUMBERS_AT_ONCE, ROWS_AT_ONCE
from cacheprobe.ops.compiled.tiles import SIDE, require_tiles

Kept = Tensor | NDArray[np.int64]
"""What the loops read or write by its address."""

_VALUES_AT_ONCE = {FLOATS: 2**18, PAIRS: 2**15, TILES: 2**17}
"""Bytes of the values that one pass over a panel of the weight uses: they stay in a core's cache. For FLOATS, more rows
share the conversion of the weight."""

_PANEL = 64
"""Most outputs that a thread takes at once."""

_LITTLE = 2**18
"""Up to this many multiplications one thread is faster than two, because to wake a thread takes time."""

_ZEROS = torch.zeros(OUTPUTS)
NormKind = tuple[int, int]
"""(whether the normalised values are rounded before they are multiplied, number that is added to the weight)"""
LLAMA, ROUNDED_ONCE, PLUS_ONE = (1, 0), (0, 0), (0, 1)
"""Kinds of RMSNorm: Llama's, OLMo 2's and Gemma's."""

_STEP = Struct(f"{NUMBERS}q")
_FLOAT, _WHOLE = Struct("d"), Struct("q")


class Queue:
    """Holds operations on tensors of one dtype, to be computed together by `run`; until then results hold no values.

    The bits of a row of a result do not depend on the other rows, on how many there are, or on the number of threads.
    `follows=False` says that an operation needs no result of the operation queued just before it, so that a thread
    need not wait between the two.
    Twin: torch's operations in float64: tests.ops.test_compiled_queue, to the rounding of the dtype.
    """

    def __init__(self, kind: int, dtype: torch.dtype, most: int = 256) -> None:
        """kind: of product, lanes.FLOATS, lanes.PAIRS or lanes.TILES. Without gradients. most: operations that fit."""
        self.kind, self.dtype, self.most = kind, dtype, most
        self._is_widened = kind == FLOATS and dtype != torch.float32
        self._numbers = np.zeros((most, NUMBERS), np.int64)
        self._buffer = self._numbers.data.cast("B")
        self._kept: list[Kept] = []
        self.described: list[NDArray[np.int64]] = []
        """The numbers that describe each cache write and attention to the loops."""
        self._widened: dict[int, Tensor] = {}
        self._num = self._work = self._most_inner = 0

    def __repr__(self) -> str:
        return f"Queue({KINDS[self.kind]}, {self.dtype}, {self._num} queued)"

    def product(self, values: Tensor, weight: Tensor, bias: Tensor | None = None, *, follows: bool = True) -> Tensor:
        """Returns values weight^T + bias, [..., o], of contiguous values [..., i], weight [o, i] and bias [o] or
        None, with i and o above 0."""
        inner, width, rows = weight.shape[1], weight.shape[0], values.numel() // weight.shape[1]
        out = values.new_empty((*values.shape[:-1], width), dtype=self.dtype)
        if over := -inner % INNER_STEP[self.kind]:
            self.run()  # torch reads the values
            values, weight, inner, follows = pad(values, (0, over)), pad(weight, (0, over)), inner + over, True
        if self._is_widened or self.kind == TILES:
            values, follows = self._converted(values, inner, follows)
        added = _ZEROS if bias is None else bias.float().contiguous()
        shared = -(-width // (8 * torch.get_num_threads()))  # several panels for each thread
        least = 2 * SIDE if self.kind == TILES else OUTPUTS
        panel = min(_PANEL, -(-shared // least) * least)
        block = rows_at_once(self.kind, inner * values.element_size())
        self._add(
            (values, weight, added, out), queue_loops.PRODUCT, follows, -(-width // panel), values.data_ptr(),
            weight.data_ptr(), added.data_ptr(), out.data_ptr(), rows, inner, width, block, panel,
            0 if bias is None else 4,
        )  # fmt: skip
        self._work += rows * inner * width
        self._most_inner = max(self._most_inner, inner)
        return out

    def norm(self, values: Tensor, weight: Tensor, eps: float, kind: NormKind = LLAMA) -> Tensor:
        """Returns the RMSNorm of contiguous values [..., m] with weight [m]. kind: how it is multiplied and rounded."""
        width = values.shape[-1]
        rows, out = values.numel() // width, torch.empty_like(values)
        self._add(
            (values, weight, out), queue_loops.NORM, True, -(-rows // ROWS_AT_ONCE), values.data_ptr(),
            weight.data_ptr(), out.data_ptr(), rows, width, *_WHOLE.unpack(_FLOAT.pack(eps)), *kind,
        )  # fmt: skip
        self._work += values.numel()
        return out

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor, starts: Tensor) -> None:
        """Writes new keys and values into a cache, as `ops.references.store_kv`; k, v as in `attention.store_call`."""
        call = store_call(k, v, keys, values, rows, starts)
        self.described.append(call)
        self._add((call, k, v, keys, values, rows, starts), queue_loops.STORE, True, len(k), call.ctypes.data)
        self._work += k.numel() + v.numel()

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        places: NDArray[np.int64],
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Returns attention outputs [b, h, t, dv]. Arguments are those of `attention.decode_attention`, which computes
        the same bits."""
        call, out = attention_call(q, keys, values, mask, places, scale, softcap)
        self.described.append(call)
        num_tasks = len(places) * values.shape[1]
        self._add((call, q, keys, values, mask, places, out), queue_loops.ATTEND, True, num_tasks, call.ctypes.data)
        self._work += int(places[:, 3].sum()) * q[0].numel()
        return out

    def silu(self, values: Tensor) -> Tensor:
        """Returns silu(values) of a contiguous tensor."""
        out, count = torch.empty_like(values), values.numel()
        self._add(
            (values, out), queue_loops.SILU, True, -(-count // NUMBERS_AT_ONCE), values.data_ptr(), 0,
            out.data_ptr(), count,
        )  # fmt: skip
        self._work += count
        return out

    def mapped(self, operation: int, values: Tensor, others: Tensor, out: Tensor) -> None:
        """Writes an operation of a MAP (queue_loops.SUM, TIMES, MINUS, COPY) on tensors of at most four dimensions to
        `out`. values, others: of a shape that broadcasts to that of `out`; others is not read by MINUS and COPY."""
        shape = (1,) * (4 - out.dim()) + tuple(out.shape)
        arrays = [values.expand(out.shape), others.expand(out.shape) if operation < queue_loops.MINUS else values, out]
        steps = [(0,) * (4 - out.dim()) + array.stride() for array in arrays[:1] + arrays[1:]]
        if operation >= queue_loops.MINUS:
            steps[1] = (0, 0, 0, 1)
        rows_of_task = max(1, NUMBERS_AT_ONCE // max(1, shape[3]))
        call = np.array(
            (operation, rows_of_task, *(array.data_ptr() for array in arrays), *shape, *(n for s in steps for n in s)),
            np.int64,
        )
        self.described.append(call)
        num_tasks = -(-(shape[0] * shape[1] * shape[2]) // rows_of_task)
        self._add((call, values, others, out), queue_loops.MAP, True, num_tasks, call.ctypes.data)
        self._work += out.numel()

    def run(self) -> None:
        """Computes what is queued, and empties the queue. Raises: RuntimeError if the loops ended early."""
        if not self._num:
            return
        loops = _loops(self.kind, FORMATS[self.dtype])
        try:
            _compute(loops, self._numbers[: self._num], self._most_inner, self._work <= _LITTLE)
        finally:
            self.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> "Queue":
        """Returns an empty queue of the same kind."""
        return Queue(self.kind, self.dtype, self.most)

    def __len__(self) -> int:
        return self._num

    def clear(self) -> None:
        """Empties the queue without computing it."""
        self._kept.clear()
        self.described.clear()
        self._widened.clear()
        self._num = self._work = self._most_inner = 0

    def _converted(self, values: Tensor, inner: int, follows: bool) -> tuple[Tensor, bool]:
        """Returns (values in float32, or packed for TILES; whether the product must wait for them). Products of the
        same values share them."""
        if (found := self._widened.get(id(values))) is not None:
            return found, follows
        count = values.numel()
        if self.kind == TILES:
            rows = count // inner
            tasks, sizes = -(-rows // SIDE), (rows, inner)
            out = values.new_empty(tasks * SIDE * inner)
            operation = queue_loops.PACK
        else:
            tasks, sizes = -(-count // NUMBERS_AT_ONCE), (count,)
            out = torch.empty_like(values, dtype=torch.float32)
            operation = queue_loops.WIDEN
        self._add((values, out), operation, True, tasks, values.data_ptr(), 0, out.data_ptr(), *sizes)
        self._widened[id(values)] = out
        return out, True

    def _add(self, kept: Sequence[Kept], operation: int, follows: bool, num_tasks: int, *fields: int) -> None:
        """Appends one operation. kept: must live until the queue is computed."""
        if self._num == self.most:
            raise RuntimeError(f"a queue holds {self.most} operations at most; call run() earlier")
        numbers = (*_COUNTERS, operation, follows, num_tasks, *fields)
        _STEP.pack_into(self._buffer, self._num * _STEP.size, *numbers, *_REST[len(numbers)])
        self._kept.extend(kept)
        self._num += 1


class FixedQueue:
    """Computes the same operations many times, on the same memory: each run reads what it then holds.

    Twin: the same operations queued again (`Queue`), bitwise.
    """

    def __init__(self, queue: Queue, others: Sequence[Tensor] = ()) -> None:
        """Takes the operations of `queue`, and empties it. others: tensors that the caller keeps alive while they are
        read or written."""
        self._loops, self._most_inner = _loops(queue.kind, FORMATS[queue.dtype]), queue._most_inner
        self._is_little = queue._work <= _LITTLE
        elsewhere = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._kept = [
            one
            for one in queue._kept
            if not (isinstance(one, Tensor) and one.untyped_storage().data_ptr() in elsewhere)
        ]
        self._numbers = queue._numbers[: queue._num].copy()
        queue.clear()

    def run(self) -> None:
        """Computes all operations. Raises: RuntimeError if the loops ended early."""
        self._numbers[:, :2] = 0
        _compute(self._loops, self._numbers, self._most_inner, self._is_little)


def _compute(loops: CFunc, numbers: NDArray[np.int64], most_inner: int, is_little: bool) -> None:
    """Computes operations. Raises: RuntimeError if the loops ended early."""
    call = np.array((len(numbers), numbers.ctypes.data, most_inner), np.int64)
    run_on_threads(loops, call, is_little)
    if (numbers[:, 1] != numbers[:, queue_loops.FIELDS + 2]).any():  # compiled loops print an error and return
        raise RuntimeError(f"a queue of {len(numbers)} operations ended early")


_COUNTERS = (0,) * queue_loops.FIELDS
_REST = [(0,) * (NUMBERS - length) for length in range(NUMBERS + 1)]


def rows_at_once(kind: int, row_bytes: int) -> int:
    """Returns how many rows of values share one pass over a part of the weight."""
    least = 2 * SIDE if kind == TILES else ROWS
    return max(least, _VALUES_AT_ONCE[kind] // row_bytes // least * least)


@cache
def _loops(kind: int, format: int) -> CFunc:
    require_tiles(kind)
    return queue_loops.queue_work(kind, format)
