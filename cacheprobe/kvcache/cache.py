"""Implements the KV cache: preallocated cache rows, each with its own length, written by absolute position in every
phase.

This file contains no code for models or requests. A cache row holds one sequence; a slot of a cache row holds one
position.

    slots   0 ........ length-1 | length ........ capacity-1
            in use, attended    | stale but finite: pads and rejected drafts; masked until written again
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cacheprobe.kvcache.head_masks import HeadMasks
from cacheprobe.kvcache.ledger import CacheIntegrityError, Ledger
from cacheprobe.kvcache.storage import zero_slots
from cacheprobe.kvcache.thought import RowThought
from cacheprobe.ops.attention import Reach
from cacheprobe.ops.equality import bitwise

_SPAN_STEP = 32
"""Step in slots by which attention's span grows: fewer spans mean fewer tensor shapes."""


StoreSlots = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Function (k, v, keys, values, rows, starts) that writes new keys and values, as `ops.references.store_kv` does."""

_FEW_ROWS = 4
"""Up to this many batch indices are written slice by slice, which is faster than indexing every slot."""


class Copy(NamedTuple):
    """Holds a batch index (`copy`) that recomputes the tokens of another one (`original`) in the same pass, and which
    tokens to compare."""

    original: int
    copy: int
    shift: int
    """Number of slots by which the copy's tokens stand later in the window than the original's."""
    num_tokens: int
    """Number of tokens of this pass to compare."""
    num_again: int = 0
    """Number of earlier tokens to compare with the cache's contents, which an earlier pass computed."""


class Placed(NamedTuple):
    """Holds where a forward writes and attends, as tensors on the device that computes a layer."""

    rows: Tensor
    """[b]: the staged cache row of each batch index."""
    written_rows: Tensor
    """[b]: as `rows`, but -1 for a batch index whose keys and values are compared instead of stored."""
    starts: Tensor
    """[b]: position of the first token."""
    positions: Tensor
    """[b, t]"""


class KVCache:
    """Holds the keys and values of every layer, [rows, heads, capacity, d] each, the length of each cache row, and the
    ledger: each slot's provenance (who wrote the slot)."""

    can_compute_twice = True
    """Whether two batch indices of a pass may use one cache row; False for models that write more than keys and
    values."""
    is_written = True
    """Whether a forward stores its keys and values in the cache's slots; False if `write` only joins them to those."""

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
        self.span = capacity
        """Number of slots that attention runs over: all if results must be batch-invariant, fewer if later slots are
        unused."""
        self.reach: Reach | None = None
        """The slots that each request's attention runs over, if attention runs request by request; else None."""
        self.copy: Copy | None = None
        """The batch index of the current pass that recomputes another one's tokens; None if no batch index does."""
        self.copy_differs_at: list[tuple[int, str]] = []
        """(layer, "keys" or "values") wherever the copy in the current pass has other bits than the original."""
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
        self._staged: tuple[Tensor, Tensor, slice | Tensor] | None = None
        self._staged_places: list[tuple[int, int]] = []  # (cache row, first position) of each batch index
        self._views: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.writer: StoreSlots | None = None
        """Writes keys and values; None for torch's own indexing. The bits are the same."""
        self._placed: dict[torch.device, Placed] = {}  # of the staged positions

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

    def stage(self, rows: Sequence[int], starts: Sequence[int], width: int) -> Int[Tensor, "b t"]:
        """Sets where the next forward writes: token slot t of batch index b goes to position starts[b] + t of cache row
        rows[b].

        Returns the absolute positions [b, t]. Pads count too, so start + width must fit the capacity. A free row may
        occur several times: dummies use it, and the keys and values of dummies are never read.
        Raises: ValueError if a taken row occurs twice (except for the pass's `copy`), if there are more or fewer starts
        than rows, or if positions leave the capacity.
        """
        start = torch.tensor(starts, dtype=torch.long)
        written = [row for b, row in enumerate(rows) if not (self.copy and b == self.copy.copy) and self._taken[row]]
        if len(rows) != len(start) or len(set(written)) != len(written):
            raise ValueError(f"a forward needs one start for each of its rows, each row once; got {rows} and {starts}")
        if int(start.max()) + width > self.capacity or int(start.min()) < 0:
            raise ValueError(
                f"cache rows {list(rows)} at positions {list(starts)} + {width} slots leave the capacity of "
                f"{self.capacity}; set capacity={int(start.max()) + width} or more"
            )
        positions = start[:, None] + torch.arange(width)
        row_index = torch.tensor(list(rows), dtype=torch.long)[:, None]
        first = rows[0]
        is_run = list(rows) == list(range(first, first + len(rows)))
        self._staged = (positions, row_index, slice(first, first + len(rows)) if is_run else row_index[:, 0])
        self._staged_places = list(zip(rows, map(int, starts), strict=True))
        self.copy_differs_at.clear()
        self._placed.clear()
        return positions

    def placed(self, device: torch.device) -> Placed:
        """Returns the staged rows and positions as a Placed on `device`. The tensors are made once for each forward.
        Raises: CacheIntegrityError if nothing is staged."""
        if self._staged is None:
            raise CacheIntegrityError("no positions are staged")
        if device not in self._placed:
            rows, starts = (torch.tensor(numbers) for numbers in zip(*self._staged_places, strict=True))
            written = rows.clone()
            if self.copy is not None:
                written[self.copy.copy] = -1
            self._placed[device] = Placed(*(t.to(device) for t in (rows, written, starts, self._staged[0])))
        return self._placed[device]

    def hides_slots(self, rows: Sequence[int]) -> bool:
        """Returns True if later tokens of one of these cache rows do not attend to some of its slots."""
        return self.head_masks.concern(rows) or bool(self.hidden[list(rows)].any())

    def hidden_slots(self, layer: int) -> Bool[Tensor, "r h s"] | None:
        """Returns which slots are hidden from later tokens by the key heads of a layer, on the layer's device; None if
        no staged row has such a slot."""
        if not self.hides_slots([row for row, _ in self._staged_places]):
            return None
        by_head = self.hidden[:, None].expand(-1, self.keys[layer].shape[1], -1)
        return self.head_masks.added_to(by_head, layer).to(self.keys[layer].device)

    def write(self, layer: int, k: Float[Tensor, "b h t dk"], v: Float[Tensor, "b h t dv"]) -> tuple[Tensor, Tensor]:
        """Stores new keys and values at the staged positions. Returns all keys and values of the staged cache rows up
        to slot `self.span`, [b, h, s, d] each."""
        rows = self.store(layer, k, v)
        return self.keys[layer][:, :, : self.span][rows], self.values[layer][:, :, : self.span][rows]

    def store(
        self,
        layer: int,
        k: Float[Tensor, "b h t dk"],
        v: Float[Tensor, "b h t dv"],
        writer: StoreSlots | None = None,
        compare_later: Callable[[Callable[[], None]], None] | None = None,
    ) -> slice | Tensor:
        """Stores new keys and values at the staged positions. Returns the staged cache rows, as an index: a slice or a
        tensor.

        If a batch index recomputes the tokens of another one (`self.copy`), its keys and values are compared instead of
        stored.
        writer: writes instead of `self.writer`.  compare_later: takes the function that compares, to call it when `k`
        and `v` are computed; by default they are.
        Raises: CacheIntegrityError if `stage` was not called before, or for another number of batch indices or tokens.
        """
        if self._staged is None:
            raise CacheIntegrityError(f"layer {layer} wrote to the cache without a staged position")
        self.head_masks.enter(layer)
        positions, row_index, rows = self._staged
        keys, values = self.keys[layer], self.values[layer]
        if k.shape[0] != positions.shape[0] or k.shape[2] != positions.shape[1]:
            raise CacheIntegrityError(f"layer {layer} wrote {tuple(k.shape)} for staged {tuple(positions.shape)}")
        if self.copy is not None:
            compare = partial(self._compare, layer, self.copy, k, v)
            compare() if compare_later is None else compare_later(compare)
        if (writer := writer or self.writer) is not None:
            placed = self.placed(keys.device)
            writer(k, v, keys, values, placed.written_rows, placed.starts)
        elif len(positions) <= _FEW_ROWS:
            width = positions.shape[1]
            for b, (row, start) in enumerate(self._staged_places):
                if self.copy is None or b != self.copy.copy:
                    keys[row, :, start : start + width] = k[b]
                    values[row, :, start : start + width] = v[b]
        else:
            if self.copy is not None:  # the copy is the last batch index of its pass
                positions, row_index, k, v = positions[:-1], row_index[:-1], k[:-1], v[:-1]
            keys[row_index, :, positions] = k.transpose(1, 2)
            values[row_index, :, positions] = v.transpose(1, 2)
        return rows

    def _compare(self, layer: int, copy: Copy, k: Tensor, v: Tensor) -> None:
        """Appends (layer, "keys" or "values") to `copy_differs_at` if the recomputed keys or values have other bits."""
        row, start = self._staged_places[copy.original]
        for name, new, cached in (("keys", k, self.keys[layer]), ("values", v, self.values[layer])):
            original = new[copy.original, :, : copy.num_tokens]
            recomputed = new[copy.copy, :, copy.shift : copy.shift + copy.num_tokens]
            earlier = cached[row, :, start - copy.num_again : start]
            earlier_recomputed = new[copy.copy, :, copy.shift - copy.num_again : copy.shift]
            if not (bitwise(original, recomputed) and bitwise(earlier, earlier_recomputed)):
                self.copy_differs_at.append((layer, name))

    def row_view(self, layer: int, batch_index: int, span: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and values in the first `span` slots of the cache row that is staged for `batch_index`, as
        views [1, h, span, d] that are built once."""
        row, _ = self._staged_places[batch_index]
        key = layer, row, span
        if key not in self._views:
            keys, values = self.keys[layer], self.values[layer]
            self._views[key] = keys[row : row + 1, :, :span], values[row : row + 1, :, :span]
        return self._views[key]

    @contextmanager
    def attending_to(self, num_slots: int, reach: Reach | None = None, copy: Copy | None = None) -> Iterator[None]:
        """Limits attention to the first slots of the cache for the passes inside the `with`: `num_slots`, rounded up to
        a multiple of 32, at most the capacity.

        Sums may have other bits than over all slots. reach: attention runs request by request, over the slots that
        `reach` gives. copy: the last batch index recomputes another one's tokens.
        """
        self.span = min(-(-num_slots // _SPAN_STEP) * _SPAN_STEP, self.capacity)
        self.reach, self.copy = reach, copy
        try:
            yield
        finally:
            self.span, self.reach, self.copy = self.capacity, None, None

    def take_thoughts(self) -> list[RowThought]:
        """Returns the thoughts written since the last call, and forgets them; [] for a plain KVCache."""
        return []

    def unstage(self) -> None:
        """Forgets, after a forward, where `stage` let the forward write, and the mask tensors that `mask_by_layer`
        made for the forward. Slots that are hidden in single heads stay hidden."""
        self._staged = None
        self.head_masks.leave()

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

    def mask(
        self,
        positions: Int[Tensor, "b t"],
        dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
    ) -> Tensor:
        """Returns the additive causal mask [b, 1, t, s] over the first `self.span` slots: 0 for a slot to attend to,
        the dtype's minimum for every other slot.

        window: how many positions a token sees, including its own; None for all up to its own.
        Slots of the staged rows that cache surgery hides are masked for all later tokens. The mask is additive, never
        boolean: Hugging Face's eager attention would add a boolean mask to the scores, without an error.
        """
        slots = torch.arange(self.span)
        hidden = slots > positions[..., None]
        if window is not None:
            hidden |= slots <= positions[..., None] - window
        if self._staged is not None and bool((edited_out := self.hidden[self._staged[1][:, 0], : self.span]).any()):
            hidden |= edited_out[:, None] & (slots != positions[..., None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
        return mask[:, None].to(device)

    def mask_by_layer(self, mask: Tensor, num_heads: int) -> Tensor:
        """Returns the mask [b, 1, t, s] unchanged; or, if slots of the staged rows are hidden in single layers or
        heads, a mask [b, num_heads, t, s] that is updated in place when a layer writes to the cache.

        Raises: ValueError if slots are hidden in single layers or heads and the layers are on several devices.
        """
        rows = [row for row, _ in self._staged_places]
        if self._staged is None or not self.head_masks.concern(rows):
            return mask
        if len({tensor.device for tensor in self.keys}) > 1:
            raise ValueError("rows masked in some layers or heads need a model on one device; hide them in all layers")
        return self.head_masks.follow(mask, rows, num_heads)

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
