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
        self._results: list[Tensor] = []
        self._widened: dict[int, Tensor] = {}
        self._num = self._work = self._most_inner = 0

    def __repr__(self) -> str:
        return f"Queue({KINDS[self.kind]}, {self.dtype}, {self._num} queued)"

    def product(self, values: Tensor, weight: Tensor, bias: Tensor | None = None, *, follows: bool = True) -> Tensor:
        """Returns values weight^T + bias, [..., o], of contiguous values [..., i], weight [o, i] and bias [o] or
        None, with i and o above 0."""
        inner, width, rows = weight.shape[1], weight.shape[0], values.numel() // weight.shape[1]
        out = self._result(values.new_empty((*values.shape[:-1], width), dtype=self.dtype))
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

    def norm(self, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns the RMSNorm of contiguous values [..., m] with weight [m]."""
        width = values.shape[-1]
        rows, out = values.numel() // width, self._result(torch.empty_like(values))
        self._add(
            (values, weight, out), queue_loops.NORM, True, -(-rows // ROWS_AT_ONCE), values.data_ptr(),
            weight.data_ptr(), out.data_ptr(), rows, width, *_WHOLE.unpack(_FLOAT.pack(eps)),
        )  # fmt: skip
        self._work += values.numel()
        return out

    def rotate(self, values: Tensor, cos: Tensor, sin: Tensor, *, follows: bool = True) -> Tensor:
        """Rotates contiguous queries or keys [b, t, h, d] in place, and returns them. cos, sin: contiguous, d numbers
        for each of the b * t tokens; the first half of each vector of sin is negated."""
        heads, depth = values.shape[-2:]
        rows = values.numel() // (heads * depth)
        self._add(
            (values, cos, sin), queue_loops.ROTATE, follows, -(-rows // ROWS_AT_ONCE), values.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), rows, heads, depth,
        )  # fmt: skip
        self._work += values.numel()
        self._widened.pop(id(values), None)
        return values

    def store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: Tensor, starts: Tensor) -> None:
        """Writes new keys and values into a cache, as `ops.references.store_kv`; k, v as in `attention.store_call`."""
        call = store_call(k, v, keys, values, rows, starts)
        self._add((call, k, v, keys, values, rows, starts), queue_loops.STORE, True, len(k), call.ctypes.data)
        self._work += k.numel() + v.numel()

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, places: NDArray[np.int64], scale: float
    ) -> Tensor:
        """Returns attention outputs [b, h, t, dv]. Arguments are those of `attention.decode_attention`, which computes
        the same bits."""
        call, out = attention_call(q, keys, values, mask, places, scale)
        if len(places) == len(q):  # else torch has set some of the numbers to zero
            self._result(out)
        num_tasks = len(places) * values.shape[1]
        self._add((call, q, keys, values, mask, places, out), queue_loops.ATTEND, True, num_tasks, call.ctypes.data)
        self._work += int(places[:, 3].sum()) * q[0].numel()
        return out

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up of contiguous tensors."""
        return self._by_number(queue_loops.GATE, gate, up)

    def silu(self, values: Tensor) -> Tensor:
        """Returns silu(values) of a contiguous tensor."""
        return self._by_number(queue_loops.SILU, values, values)

    def added(self, values: Tensor, others: Tensor) -> Tensor:
        """Returns values + others of contiguous tensors."""
        return self._by_number(queue_loops.ADD, values, others)

    def run(self) -> None:
        """Computes what is queued, and empties the queue. Raises: RuntimeError if the loops ended early."""
        if not self._num:
            return
        loops = _loops(self.kind, FORMATS[self.dtype])
        try:
            _compute(loops, self._numbers[: self._num], self._most_inner, self._work <= _LITTLE)
        finally:
            self.clear()

    @property
    def is_long(self) -> bool:
        """True if half of the places in the queue are taken."""
        return 2 * self._num > self.most

    def clear(self) -> None:
        """Empties the queue without computing it."""
        self._kept.clear()
        self._results.clear()
        self._widened.clear()
        self._num = self._work = self._most_inner = 0

    def _by_number(self, operation: int, values: Tensor, others: Tensor) -> Tensor:
        out, count = self._result(torch.empty_like(values)), values.numel()
        self._add(
            (values, others, out), operation, True, -(-count // NUMBERS_AT_ONCE), values.data_ptr(),
            others.data_ptr(), out.data_ptr(), count,
        )  # fmt: skip
        self._work += count
        return out

    def _converted(self, values: Tensor, inner: int, follows: bool) -> tuple[Tensor, bool]:
        """Returns (values in float32, or packed for TILES; whether the product must wait for them). Products of the
        same values share them."""
        if (found := self._widened.get(id(values))) is not None:
            return found, follows
        count = values.numel()
        if self.kind == TILES:
            rows = count // inner
            tasks, sizes = -(-rows // SIDE), (rows, inner)
            out = self._result(values.new_empty(tasks * SIDE * inner))
            operation = queue_loops.PACK
        else:
            tasks, sizes = -(-count // NUMBERS_AT_ONCE), (count,)
            out = self._result(torch.empty_like(values, dtype=torch.float32))
            operation = queue_loops.WIDEN
        self._add((values, out), operation, True, tasks, values.data_ptr(), 0, out.data_ptr(), *sizes)
        self._widened[id(values)] = out
        return out, True

    def _result(self, out: Tensor) -> Tensor:
        """Returns a tensor that the next operation fills, after it was added to the results."""
        self._results.append(out)
        return out

    def _add(self, kept: Sequence[Kept], operation: int, follows: bool, num_tasks: int, *fields: int) -> None:
        """Appends one operation. kept: must live until the queue is computed."""
        if self._num == self.most:
            raise RuntimeError(f"a queue holds {self.most} operations at most; call run() earlier")
        numbers = (*_COUNTERS, operation, follows, num_tasks, *fields)
        _STEP.pack_into(self._buffer, self._num * _STEP.size, *numbers, *_REST[len(numbers)])
        self._kept.extend(kept)
        self._num += 1


class PreparedQueue:
    """Computes the same operations many times; each run reads what the inputs and weights then hold.

    They must stay at their addresses, and an operation that reads a result must read all of it. A few results, `fresh`,
    have new memory every time. The others share memory: a result takes the place of one that no later operation reads.
    Twin: the same operations queued again (`Queue`), bitwise: tests.ops.test_prepared_queue.
    """

    def __init__(self, queue: Queue, fresh: Sequence[Tensor], fixed: Sequence[Tensor] = ()) -> None:
        """Takes the operations of `queue`, and empties it. fresh: tensors of one shape; the first is an input.  fixed:
        results that stay in their own memory, and hold their values until `run` is called again.

        Raises: ValueError if an operation reads a part of a result."""
        num = queue._num
        self._loops, self._most_inner = _loops(queue.kind, FORMATS[queue.dtype]), queue._most_inner
        self._is_little = queue._work <= _LITTLE
        tables = {kept.ctypes.data: kept for kept in queue._kept if isinstance(kept, np.ndarray)}
        described = np.isin(queue._numbers[:num, queue_loops.FIELDS], (queue_loops.STORE, queue_loops.ATTEND))
        addresses = queue._numbers[:num, _CALL].tolist()
        calls = [
            tables[address] if is_described else None
            for address, is_described in zip(addresses, described, strict=True)
        ]
        parts = [queue._numbers[:num].ravel(), *(call for call in calls if call is not None)]
        self._memory = np.concatenate(parts)
        self._numbers = self._memory[: num * NUMBERS].reshape(num, NUMBERS)
        at, uses = num * NUMBERS, []
        for step, call in zip(self._numbers, calls, strict=True):
            uses.append((step if call is None else call).tolist())
            if call is not None:
                step[_CALL] = self._memory[at:].ctypes.data
                at += len(call)
        unmoved = {tensor.data_ptr() for tensor in (*fresh, *fixed)}
        sizes = {t.data_ptr(): t.nbytes for t in queue._results if t.data_ptr() not in unmoved}
        waits = self._numbers[:, queue_loops.FIELDS + 1].astype(bool).tolist()
        offsets, total = _shared_offsets(uses, sizes, waits)
        self._scratch = torch.empty(total, dtype=torch.uint8)
        moved = {address: self._scratch.data_ptr() + offset for address, offset in offsets.items()}
        places = [(place, number) for place, number in enumerate(self._memory.tolist()) if number in moved]
        self._memory[[place for place, _ in places]] = [moved[number] for _, number in places]
        self._shape, self._dtype = (len(fresh), *fresh[0].shape), fresh[0].dtype
        offset_of = {tensor.data_ptr(): number * tensor.nbytes for number, tensor in enumerate(fresh)}
        found = [(place, offset_of[n]) for place, n in enumerate(self._memory.tolist()) if n in offset_of]
        self._fresh_places, self._fresh_offsets = np.array(found, np.int64).reshape(-1, 2).T.copy()
        gone = {*sizes, *offset_of}
        read = [kept for kept in queue._kept if isinstance(kept, Tensor)]
        if any(one.data_ptr() not in gone and one.untyped_storage().data_ptr() in gone for one in read):
            raise ValueError("an operation reads a part of another one's result, which has no place of its own")
        described_by = {id(call) for call in calls}
        self._kept = [
            kept
            for kept in queue._kept
            if (kept.data_ptr() not in gone if isinstance(kept, Tensor) else id(kept) not in described_by)
        ]
        queue.clear()

    def __repr__(self) -> str:
        return f"PreparedQueue({len(self._numbers)} operations, {self._scratch.nbytes / 2**10:.0f} KiB)"

    def run(self, first: Tensor) -> Tensor:
        """Computes all operations, and returns the fresh tensors [n, ...]. first: values of the first of them.

        Raises: RuntimeError if the loops ended early.
        """
        out = torch.empty(self._shape, dtype=self._dtype)
        out[0] = first
        self._memory[self._fresh_places] = self._fresh_offsets + out.data_ptr()
        self._numbers[:, :2] = 0
        _compute(self._loops, self._numbers, self._most_inner, self._is_little)
        return out


def _shared_offsets(
    uses: Sequence[Sequence[int]], sizes: dict[int, int], waits: Sequence[bool]
) -> tuple[dict[int, int], int]:
    """Returns (offset of each result, bytes in all), for results that may lie in the memory of earlier ones.

    uses: for each operation, numbers among which are the addresses of what it reads and writes.  sizes: bytes of each
    result, by address.  waits: whether an operation waits for all earlier ones.
    """
    last = {number: index for index, numbers in enumerate(uses) for number in numbers if number in sizes}
    offsets: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    taken: list[int] = []
    total = 0
    for index, numbers in enumerate(uses):
        if waits[index]:
            for address in [one for one in taken if last[one] < index]:
                taken.remove(address)
                free.setdefault(_aligned(sizes[address]), []).append(offsets[address])
        for address in numbers:
            if address in sizes and address not in offsets:
                size = _aligned(sizes[address])
                if free.get(size):
                    offsets[address] = free[size].pop()
                else:
                    offsets[address], total = total, total + size
                taken.append(address)
    return offsets, total


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _compute(loops: CFunc, numbers: NDArray[np.int64], most_inner: int, is_little: bool) -> None:
    """Computes operations. Raises: RuntimeError if the loops ended early."""
    call = np.array((len(numbers), numbers.ctypes.data, most_inner), np.int64)
    run_on_threads(loops, call, is_little)
    if (numbers[:, 1] != numbers[:, queue_loops.FIELDS + 2]).any():  # compiled loops print an error and return
        raise RuntimeError(f"a queue of {len(numbers)} operations ended early")


_CALL = queue_loops.FIELDS + 3
"""Place, in the numbers of a cache write or an attention, of the address of the numbers that describe it."""

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
