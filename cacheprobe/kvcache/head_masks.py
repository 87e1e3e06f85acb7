"""Hides cache slots from later tokens in some layers or heads only."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Place = tuple[int, int, int]
"""(layer, head of keys and values, position)."""


class HeadMasks:
    """Hidden slots by cache row, layer and head, and the masks of the current forward.

    A model takes one mask for all its layers. Each layer writes to the cache before it attends; at that moment the mask
    tensor is updated in place for this layer.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: dict[int, dict[int, Tensor]] = {}  # row -> layer -> [h, s]
        self._masks: list[tuple[Tensor, Tensor]] = []  # what the model was given, and what it says without us
        self._rows: Sequence[int] = ()

    def put(self, row: int, places: Iterable[Place], heads: Sequence[int]) -> None:
        """Hides these places of a row and shows all others.  heads: number of key heads of each layer."""
        self._slots.pop(row, None)
        for layer, head, position in places:
            of_row = self._slots.setdefault(row, {})
            if layer not in of_row:
                of_row[layer] = torch.zeros(heads[layer], self._capacity, dtype=torch.bool)
            of_row[layer][head, position] = True

    def of(self, row: int, length: int) -> frozenset[Place]:
        """Returns the hidden places among a row's first `length` positions."""
        held = self._slots.get(row, {}).items()
        return frozenset((layer, *place) for layer, hidden in held for place in hidden[:, :length].nonzero().tolist())

    def truncate(self, row: int, length: int) -> None:
        """Clears the hidden places from position `length` on."""
        for hidden in self._slots.get(row, {}).values():
            hidden[:, length:] = False
        if not self.of(row, length):
            self._slots.pop(row, None)

    def concern(self, rows: Sequence[int]) -> bool:
        """Returns whether any of these rows has places hidden in some layers or heads only."""
        return any(row in self._slots for row in rows)

    def follow(self, mask: Tensor, rows: Sequence[int], num_heads: int) -> Tensor:
        """Returns the mask [b, num_heads, t, s] to pass to the model; `enter` updates it for each layer.

        mask: [b, 1, t, s] of the staged rows.  num_heads: number of query heads.
        """
        own = mask.expand(-1, num_heads, -1, -1).clone()
        self._masks.append((own, mask))
        self._rows = rows
        return own

    def enter(self, layer: int) -> None:
        """Sets the mask for the layer that attends next."""
        for own, plain in self._masks:
            own.copy_(plain.expand_as(own))
            for b, row in enumerate(self._rows):
                hidden = self._slots.get(row, {}).get(layer)
                if hidden is not None:
                    of_queries = hidden[:, : own.shape[-1]].repeat_interleave(own.shape[1] // len(hidden), 0)
                    own[b].masked_fill_(of_queries[:, None].to(own.device), torch.finfo(own.dtype).min)

    def leave(self) -> None:
        """Drops the masks at the end of a forward."""
        self._masks.clear()
