"""Defines OwnCache, the cache of a drafter's own model: one row for each request that drafts."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.recurrent import copy_states
from cacheprobe.kvcache.sequence import SequenceState

_CAPACITY_STEP = 128
"""Slots; the capacity of the cache is a multiple of this number."""


@runtime_checkable
class MakesCaches(Protocol):
    """Describes a model that makes caches of up to `n_ctx` slots a row."""

    n_ctx: int

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """Returns an empty KVCache."""
        ...


class OwnCache:
    """Gives each request a row of a KVCache that grows with the requests and their texts."""

    def __init__(self) -> None:
        self._cache: KVCache | None = None
        self._rows: WeakKeyDictionary[SequenceState, int] = WeakKeyDictionary()

    @property
    def cache(self) -> KVCache:
        """The cache of the last `make_room`, which must come first."""
        assert self._cache is not None
        return self._cache

    def row_of(self, state: SequenceState) -> int:
        """Returns the row of a request; the lowest free one if it has none."""
        if state not in self._rows:
            taken = {*self._rows.values()}
            self._rows[state] = min({*range(len(taken) + 1)} - taken)
        return self._rows[state]

    def forget(self, state: SequenceState) -> None:
        """Frees a request's row."""
        self._rows.pop(state, None)

    def make_room(self, model: MakesCaches, states: Iterable[SequenceState], num_slots: int) -> None:
        """Gives these requests rows of at least `num_slots` slots, or of the model's whole context. What the cache
        holds stays. model: makes the cache."""
        rows = 1 + max(self.row_of(state) for state in states)
        old, capacity = self._cache, min(num_slots, model.n_ctx)
        if old is not None and rows <= old.rows and capacity <= old.capacity:
            return
        if old is not None:  # double what is too small, so that copies stay rare
            rows = max(old.rows, 2 * old.rows if rows > old.rows else 0, rows)
            capacity = max(old.capacity, 2 * old.capacity if capacity > old.capacity else 0, capacity)
        capacity = min(-(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP, model.n_ctx)
        self._cache = model.new_cache(rows, capacity)
        if old is not None:
            pairs = zip((*self._cache.keys, *self._cache.values), (*old.keys, *old.values), strict=True)
            for new_tensor, old_tensor in pairs:
                new_tensor[: old.rows, :, : old.capacity] = old_tensor
            copy_states(old, self._cache)
