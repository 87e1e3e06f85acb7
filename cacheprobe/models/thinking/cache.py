"""A KV cache that also holds what thinking needs: H of every position, the state to add there, and the newest thoughts.

Everything is indexed by position, like keys and values: a rollback truncates the row, and what lies beyond its length
is stale until it is computed again. Half-filled chunks need nothing more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheprobe.kvcache.cache import KVCache


@dataclass(frozen=True, slots=True)
class RowThought:
    """A thought that a forward made for one cache row."""

    row: int
    end: int
    """Absolute position of the last token of the chunk that it was made from."""
    token_ids: tuple[int, ...]
    has_ended: bool
    """False where it was cut at the limit."""
    logprobs: tuple[float, ...]
    """Of each of its tokens, in nats."""
    first_logits: Tensor
    """[v] of its first token."""
    state: Tensor
    """[c, m]: what is added to the next chunk."""


class ThinkingCache(KVCache):
    """Rows of keys, values, H and states."""

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
        """State to add at each position; the thought of the last chunk may write beyond the capacity."""
        self._thoughts: list[RowThought] = []

    @property
    def cache_bytes(self) -> int:
        return super().cache_bytes + sum(t.numel() * t.element_size() for t in (self.h_rows, self.states))

    def copy_row(self, source: int, target: int, length: int) -> None:
        super().copy_row(source, target, length)
        self.h_rows[target] = self.h_rows[source]
        self.states[target] = self.states[source]

    def scrub(self, row: int, start: int) -> None:
        super().scrub(row, start)
        self.h_rows[row, start:] = 0
        self.states[row, start:] = 0

    def note(self, thought: RowThought) -> None:
        self._thoughts.append(thought)

    def take_thoughts(self) -> list[RowThought]:
        taken, self._thoughts = self._thoughts, []
        return taken
