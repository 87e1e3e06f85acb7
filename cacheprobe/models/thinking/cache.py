"""A KV cache that also stores what a Thinking States model needs: H, the state to add at each position, and new
thoughts.

Every tensor is indexed by position, like keys and values. A rollback only shortens the sequence; values beyond its
length are stale until computed again. Half-filled chunks need no further record.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.thought import RowThought as RowThought
from cacheprobe.models.thinking.blocks import Memory, Remembered, attention_bias
from cacheprobe.models.thinking.config import ThinkingConfig


class ThinkingCache(KVCache):
    """Cache of keys, values, H and chunk states for several sequences."""

    can_compute_twice = False

    def __init__(
        self,
        rows: int,
        capacity: int,
        layer_shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device | str,
        d_model: int,
        chunk: int,
    ) -> None:
        super().__init__(rows, capacity, layer_shapes, dtype, device)
        self.h_rows = torch.zeros(rows, capacity, d_model, dtype=dtype, device=device)
        self.states = torch.zeros(rows, capacity + chunk, d_model, dtype=dtype, device=device)
        """The state to add at each position; the thought of the last chunk may write beyond the capacity."""
        self._thoughts: list[RowThought] = []

    @property
    def cache_bytes(self) -> int:
        """Size of all cached tensors in bytes."""
        return super().cache_bytes + sum(t.numel() * t.element_size() for t in (self.h_rows, self.states))

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` slots, with H and states, from one cache row to another."""
        super().copy_row(source, target, length)
        self.h_rows[target] = self.h_rows[source]
        self.states[target] = self.states[source]

    def scrub(self, row: int, start: int) -> None:
        """Sets keys, values, H and states of a cache row to zero from slot `start` on."""
        super().scrub(row, start)
        self.h_rows[row, start:] = 0
        self.states[row, start:] = 0

    def note(self, thought: RowThought) -> None:
        """Keeps a new thought until `take_thoughts` returns it."""
        self._thoughts.append(thought)

    def take_thoughts(self) -> list[RowThought]:
        """Returns the thoughts noted since the last call, and forgets them."""
        taken, self._thoughts = self._thoughts, []
        return taken


def cache_memory(config: ThinkingConfig, cache: KVCache, positions: Tensor) -> Memory:
    """Returns the Memory of a pass over a cache: a layer writes its new keys and values, and attends to all cached
    ones."""
    dtype, device = cache.keys[0].dtype, cache.keys[0].device
    slots = torch.arange(cache.span)[None]
    bias = attention_bias(config, positions, slots, config.attention_window)
    if not config.thinks:  # rows of keys and values alone may be masked by cache surgery
        bias = bias + cache.mask(positions, bias.dtype, device)
    lowest = max(torch.finfo(kind).min for kind in (bias.dtype, dtype))
    bias = bias.clamp_(min=lowest).to(dtype)  # finite in 16 bits too
    bias = cache.mask_by_layer(bias, config.n_heads)

    def memory(layer: int, keys: Tensor, values: Tensor) -> Remembered:
        """Writes keys and values to the cache; returns the cached ones, the mask and the pass's Reach."""
        return *cache.write(layer, keys, values), bias, cache.reach

    return memory
