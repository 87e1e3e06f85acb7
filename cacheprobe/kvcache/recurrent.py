"""Stores the recurrent and convolution states of each cache row by position, beside a KV cache.

A recurrent layer sums all earlier tokens into one state, from which no token can be taken out again. So the state after
every recent token is kept: a rollback shortens the row, and the next pass starts from the state of the last position
that is left.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.ledger import CacheIntegrityError

StateKey = tuple[str, int]
"""("conv" or "recurrent", number of the state in its layer)."""
LayerStates = Mapping[StateKey, Tensor]
"""The states of one layer after one token, without a batch axis."""
RowStates = Mapping[int, Mapping[int, LayerStates]]
"""The states of one cache row by layer and position."""

LEAST_KEPT = 32
"""Positions before a pass whose states are always kept. A longer window of drafts is refused if all do not fit."""
MOST_BYTES = 1 << 28
"""States of all positions are kept if they take at most this many bytes; otherwise those of recent positions."""


def positions_kept(rows: int, capacity: int, bytes_of_position: int) -> int:
    """Returns for how many positions of each row, before a pass, the states are kept."""
    fitting = MOST_BYTES // max(1, bytes_of_position * rows)
    return capacity if fitting >= capacity else max(LEAST_KEPT, fitting)


def before(states: RowStates, length: int) -> RowStates:
    """Returns those of a cache row's states that are of its first `length` positions."""
    return {layer: {at: one for at, one in kept.items() if at < length} for layer, kept in states.items()}


class RecurrentMemory:
    """Holds, for every recurrent layer and cache row, the states after each recent position. Kept states are never
    changed in place, so that rows may share them."""

    def __init__(self, rows: int, capacity: int, initial: Mapping[int, LayerStates]) -> None:
        """initial: the states before the first token, by layer."""
        self.initial = initial
        self.is_written = True
        """False for a prefix that several sequences continue: new states are not stored."""
        self.bytes_of_position = sum(
            value.numel() * value.element_size() for states in initial.values() for value in states.values()
        )
        self.kept = positions_kept(rows, capacity, self.bytes_of_position)
        """Number of positions before a pass whose states stay."""
        self._of_row: list[dict[int, dict[int, LayerStates]]] = [
            {layer: {} for layer in self.initial} for _ in range(rows)
        ]

    def unwritten(self) -> "RecurrentMemory":
        """Returns a memory with the same states, which stores no new ones."""
        other = copy(self)
        other.is_written = False
        return other

    def after(self, layer: int, row: int, position: int) -> LayerStates:
        """Returns a layer's states after the token at `position` of a cache row; -1 for those before the first token.

        Raises: CacheIntegrityError if they are not kept.
        """
        if position < 0:
            return self.initial[layer]
        if (states := self._of_row[row][layer].get(position)) is None:
            raise CacheIntegrityError(
                f"cache row {row} keeps no recurrent state of layer {layer} after position {position}: only those of "
                f"its last pass and of {self.kept} positions before it are kept; choose a window below {self.kept}, or "
                "feed its tokens again from position 0"
            )
        return states

    def record(self, layer: int, row: int, position: int, states: LayerStates) -> None:
        """Stores copies of a layer's states after the token at `position`, beside its other states there: those of
        another module."""
        if self.is_written:
            copies = {key: value.clone() for key, value in states.items()}
            self._of_row[row][layer][position] = {**self._of_row[row][layer].get(position, {}), **copies}

    def forget_before(self, layer: int, row: int, start: int) -> None:
        """Drops states that no pass from position `start` on can need: those of more than `kept` positions before."""
        of_layer = self._of_row[row][layer]
        if self.is_written and len(of_layer) > self.kept:
            self._of_row[row][layer] = {at: one for at, one in of_layer.items() if at >= start - self.kept}

    def drop(self, row: int, start: int) -> None:
        """Drops the states of a cache row from position `start` on."""
        self.put(row, self.of_row(row, start))

    def share(self, source: "RecurrentMemory", source_row: int, row: int, length: int) -> None:
        """Gives a cache row the states that `source` keeps of the first `length` positions of its row."""
        self.put(row, source.of_row(source_row, length))

    def of_row(self, row: int, length: int) -> RowStates:
        """Returns the kept states of the first `length` positions of a cache row."""
        return before(self._of_row[row], length)

    def put(self, row: int, states: RowStates) -> None:
        """Gives a cache row these states in place of its own."""
        self._of_row[row] = {layer: dict(of_layer) for layer, of_layer in states.items()}

    def fill(self, rows: Sequence[int], position: int, draw: torch.Generator) -> None:
        """Sets the same random states after `position` in several cache rows, for trials."""
        for layer, states in self.initial.items():
            noise = {key: torch.randn(value.shape, generator=draw).to(value) for key, value in states.items()}
            for row in rows:
                self._of_row[row][layer][position] = noise

    def states(self, row: int) -> Iterator[tuple[int, int, StateKey, Tensor]]:
        """Yields (layer, position, key, state) of every kept state of a cache row, in order."""
        for layer, of_layer in self._of_row[row].items():
            for position in sorted(of_layer):
                for key, value in of_layer[position].items():
                    yield layer, position, key, value


class RecurrentCache(KVCache):
    """Stores keys and values of attention layers, and the states of recurrent layers by position."""

    can_compute_twice = False

    def __init__(
        self,
        rows: int,
        capacity: int,
        layer_shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: "torch.device | str | Sequence[torch.device]",
        initial: Mapping[int, LayerStates],
    ) -> None:
        """initial: the states before the first token, by layer. Layers without keys have the shape (0, 0, 0)."""
        super().__init__(rows, capacity, layer_shapes, dtype, device)
        self.recurrent = RecurrentMemory(rows, capacity, initial)

    @property
    def cache_bytes(self) -> int:
        """Size in bytes of keys, values and the states that are kept before a pass."""
        return super().cache_bytes + bytes_of_states(self, self.rows, self.capacity)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one cache row to another: keys, values, states and provenance."""
        super().copy_row(source, target, length)
        self.recurrent.share(self.recurrent, source, target, length)

    def release(self, row: int) -> None:
        """Frees a cache row and drops its states."""
        super().release(row)
        self.recurrent.drop(row, 0)

    def scrub(self, row: int, start: int) -> None:
        """Zeroes keys and values of a cache row from slot `start` on, and drops the states."""
        super().scrub(row, start)
        self.recurrent.drop(row, start)

    def check_integrity(self) -> None:
        """Checks the whole cache, as KVCache does. Raises: CacheIntegrityError also if a state in use is not finite."""
        super().check_integrity()
        for row in range(self.rows):
            for layer, position, (kind, _), value in self.recurrent.states(row):
                if position < int(self.lengths[row]) and not bool(torch.isfinite(value).all()):
                    raise CacheIntegrityError(
                        f"layer {layer}: the {kind} state of cache row {row} after position {position} holds NaN or "
                        "infinity"
                    )


def memory_of(cache: KVCache) -> RecurrentMemory | None:
    """Returns the recurrent states that a cache holds beside keys and values; None for a plain KVCache."""
    found = vars(cache).get("recurrent")
    return found if isinstance(found, RecurrentMemory) else None


def bytes_of_states(cache: KVCache, rows: int, capacity: int, width: int = 0) -> int:
    """Returns the size in bytes of the recurrent states in a cache of this kind with `rows` rows of `capacity` slots,
    of which each pass feeds `width`; 0 for a plain KVCache."""
    if (memory := memory_of(cache)) is None:
        return 0
    kept = positions_kept(rows, capacity, memory.bytes_of_position)
    return rows * min(capacity, kept + width) * memory.bytes_of_position


def copy_prefix(source: KVCache, target: KVCache, length: int) -> None:
    """Copies the first `length` positions of cache row 0 of one cache to every row of another: keys, values and
    recurrent states. Lengths and provenance stay as they are."""
    for ours, theirs in ((target.keys, source.keys), (target.values, source.values)):
        for into, tensor in zip(ours, theirs, strict=True):
            into[:, :, :length] = tensor[:1, :, :length]
    into_memory, memory = memory_of(target), memory_of(source)
    if into_memory is not None and memory is not None:
        for row in range(target.rows):
            into_memory.share(memory, 0, row, length)


def copy_states(source: KVCache, target: KVCache) -> None:
    """Gives every row of `target` the recurrent states of the same row of `source`, if they have any."""
    into_memory, memory = memory_of(target), memory_of(source)
    if into_memory is not None and memory is not None:
        for row in range(source.rows):
            into_memory.share(memory, row, row, source.capacity)
