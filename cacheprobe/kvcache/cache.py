"""Implements the KV cache: preallocated cache rows, each with its own length, written by absolute position in every
phase.

This file contains no code for models or requests. A cache row holds one sequence; a slot of a cache row holds one
position.

    slots   0 ........ length-1 | length ........ capacity-1
            in use, attended    | stale but finite: pads and rejected drafts; masked until written again
"""

import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from cacheprobe.kvcache.head_masks import HeadMasks
from cacheprobe.kvcache.ledger import CacheIntegrityError, Ledger

_ALIGNED_SLOTS = 64
"""Each cache row occupies a multiple of this number of slots in memory. Every row and head then begins at a multiple of
64 bytes; the sums of some libraries depend on this alignment."""
_LEAST_MAPPED = 1 << 20
"""Bytes from which a tensor is mapped; smaller ones are not worth a mapping of their own."""

StoreSlots = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Function (k, v, keys, values, rows, starts) that writes new keys and values, as `ops.cache_rows.store_kv` does."""


@dataclass(frozen=True, slots=True)
class RowThought:
    """Holds a thought that a Thinking States model wrote for one cache row (one sequence): its tokens,
    log-probabilities and chunk state."""

    cache_row: int
    end: int
    """Absolute position of the last token of the chunk that the thought was computed from."""
    token_ids: tuple[int, ...]
    has_ended: bool
    """False if the thought was cut at the length limit."""
    logprobs: tuple[float, ...]
    """Log-probability of each thought token, in nats."""
    first_logits: Tensor
    """Logits [v] of the first thought token."""
    state: Tensor
    """The chunk state [c, m], which is added to the input of block l_in at the positions of the next chunk."""


class KVCache:
    """Holds the keys and values of every layer, [rows, heads, capacity, d] each, the length of each cache row, and the
    ledger: each slot's provenance (who wrote the slot)."""

    can_compute_twice = True
    """Whether two batch indices of a pass may use one cache row; False for models that write more than keys and
    values."""

    def __init__(
        self,
        rows: int,
        capacity: int,
        layer_shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: "torch.device | str | Sequence[torch.device]" = "cpu",
    ) -> None:
        """Allocates the cache. rows: number of cache rows.  layer_shapes: (heads, key width, value width) of each
        layer.  device: one for all layers, or one for each.

        Tensors start as zeros, never `empty`: a NaN in a masked slot would turn the attention of every later token into
        NaN.
        """
        self.rows, self.capacity = rows, capacity
        devices = [device] * len(layer_shapes) if isinstance(device, str | torch.device) else device
        layers = list(zip(layer_shapes, devices, strict=True))
        self.keys = [zero_slots(rows, h, capacity, dk, dtype, at) for (h, dk, _), at in layers]
        self.values = [zero_slots(rows, h, capacity, dv, dtype, at) for (h, _, dv), at in layers]
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self.prompt_lengths = torch.zeros(rows, dtype=torch.long)
        """Number of prompt positions of each cache row, for models that read a prompt differently from generated
        tokens."""
        self.hidden = torch.zeros(rows, capacity, dtype=torch.bool)
        """Slots that cache surgery hides from all later tokens."""
        self.head_masks = HeadMasks(capacity)
        """Slots that cache surgery hides in some layers or heads only."""
        self.ledger = Ledger(rows, capacity)
        self._taken = [False] * rows
        self.writer: StoreSlots | None = None
        """Writes keys and values; None for torch's own indexing. The bits are the same."""
        self.views: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        """By (layer, cache row, span): views of keys and values, built once by `StagedCache.row_view`."""

    def __repr__(self) -> str:
        used = f"{sum(self._taken)} of {self.rows} rows, {int(self.lengths.sum())} slots in use"
        return f"KVCache({len(self.keys)} layers, {used}, capacity {self.capacity}, {self.cache_bytes / 2**20:.0f} MiB)"

    @property
    def cache_bytes(self) -> int:
        """Size of keys and values in bytes, without the slots that only align the rows in memory."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    @property
    def num_free_rows(self) -> int:
        """Number of cache rows that no request uses."""
        return self._taken.count(False)

    def is_free(self, row: int) -> bool:
        """Returns whether no request uses cache row `row`."""
        return not self._taken[row]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` slots of one cache row to another: keys, values and provenance, not the hiding of
        slots. Sets the target's length. Raises: CacheIntegrityError if the source has fewer slots in use."""
        if length > int(self.lengths[source]):
            raise CacheIntegrityError(f"cache row {source} holds {int(self.lengths[source])} slots, not {length}")
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]
        self.ledger.codes[target, :length] = self.ledger.codes[source, :length]
        self.lengths[target] = length

    def allocate(self) -> int:
        """Marks the lowest free cache row as taken and returns its number. Raises: CacheIntegrityError if none is
        free."""
        if not self.num_free_rows:
            raise CacheIntegrityError(f"all {self.rows} cache rows are taken; a row was not released, or rows= is low")
        row = self._taken.index(False)
        self._taken[row] = True
        return row

    def release(self, row: int) -> None:
        """Frees a cache row and all its slots; keys and values stay, stale and masked. Raises: CacheIntegrityError if
        the row is free already."""
        if not self._taken[row]:
            raise CacheIntegrityError(f"cache row {row} was released twice")
        self.truncate(row, 0)
        self.prompt_lengths[row] = 0
        self._taken[row] = False

    def hides_slots(self, rows: Sequence[int]) -> bool:
        """Returns True if later tokens of one of these cache rows do not attend to some of its slots."""
        return self.head_masks.concern(rows) or bool(self.hidden[list(rows)].any())

    def take_thoughts(self) -> list[RowThought]:
        """Returns the thoughts written since the last call, and forgets them; [] for a plain KVCache."""
        return []

    def extend(self, row: int, start: int, end: int, provenance: str) -> None:
        """Marks slots start..end-1 of a cache row as holding real tokens, and lengthens a shorter row to `end`. Slots
        in use may be marked again.

        Raises: CacheIntegrityError for a hole before `start`, slots beyond the capacity, or `end` below `start`.
        """
        if not 0 <= start <= int(self.lengths[row]) or end > self.capacity or end < start:
            raise CacheIntegrityError(
                f"cache row {row} of length {int(self.lengths[row])} cannot take slots {start} to {end}"
            )
        self.ledger.mark(row, start, end, provenance)
        self.lengths[row] = max(int(self.lengths[row]), end)

    def truncate(self, row: int, length: int) -> None:
        """Frees the slots of a cache row from `length` on; freed slots are hidden no longer. Raises:
        CacheIntegrityError if the row is shorter than `length`, or `length` is negative."""
        if not 0 <= length <= int(self.lengths[row]):
            raise CacheIntegrityError(f"cannot truncate cache row {row} of length {int(self.lengths[row])} to {length}")
        self.ledger.mark(row, length, int(self.lengths[row]), "free")
        self.hidden[row, length:] = False
        self.head_masks.truncate(row, length)
        self.lengths[row] = length

    def scrub(self, row: int, start: int) -> None:
        """Sets the keys and values of a cache row to zero from slot `start` on: a failed pass may have left NaN, which
        no mask hides."""
        for tensor in (*self.keys, *self.values):
            tensor[row, :, start:] = 0

    def check_integrity(self) -> None:
        """Checks the whole cache. Raises: CacheIntegrityError unless lengths and ledger agree, free rows are empty, and
        every slot is finite."""
        self.ledger.check(self.lengths)
        for row, taken in enumerate(self._taken):
            if not taken and int(self.lengths[row]):
                raise CacheIntegrityError(f"cache row {row} is free but has length {int(self.lengths[row])}")
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for name, tensor in (("keys", keys), ("values", values)):
                if not _is_finite(tensor):
                    raise CacheIntegrityError(f"layer {layer}: the cache's {name} hold NaN or infinity")


def _is_finite(values: Tensor) -> bool:
    """Returns True if every number of a tensor is finite."""
    return bool(torch.isfinite(torch.linalg.vector_norm(values))) or bool(torch.isfinite(values).all())


# -- memory


def is_mapped(device: torch.device | str) -> bool:
    """Returns True if large tensors of the device take memory only where something was written."""
    return sys.platform == "linux" and torch.device(device).type == "cpu"


def zero_slots(
    rows: int, heads: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Returns a zero tensor [rows, heads, capacity, width] whose rows and heads begin at multiples of 64 bytes."""
    allocated = -(-capacity // _ALIGNED_SLOTS) * _ALIGNED_SLOTS
    return zeros((rows, heads, allocated, width), dtype, device)[:, :, :capacity]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns a zero tensor. On a Linux CPU, a large one takes memory only where something is written later.
    Twin: torch.zeros, the same values, all memory at once."""
    num_bytes = prod(shape) * dtype.itemsize
    if not is_mapped(device) or num_bytes < _LEAST_MAPPED:
        return torch.zeros(shape, dtype=dtype, device=device)
    # private: a forked process must not see what this one writes; without huge pages, which would fill unused slots
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
