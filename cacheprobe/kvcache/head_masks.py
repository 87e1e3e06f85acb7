"""Hides cache slots from later tokens in chosen layers and heads only, for cache surgery."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

LayerHeadPosition = tuple[int, int, int]
"""(layer, head of keys and values, position) at which a cache slot is hidden."""


class HeadMasks:
    """Holds which slots no later token attends to, by cache row, layer and head."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: dict[int, dict[int, Tensor]] = {}  # cache row -> layer -> [h, s]

    def put(self, row: int, places: Iterable[LayerHeadPosition], heads: Sequence[int]) -> None:
        """Hides these (layer, head, position) places of a cache row from later tokens, in place of those that were
        hidden before.  heads: number of key heads of each layer."""
        self._slots.pop(row, None)
        for layer, head, position in places:
            by_layer = self._slots.setdefault(row, {})
            if layer not in by_layer:
                by_layer[layer] = torch.zeros(heads[layer], self._capacity, dtype=torch.bool)
            by_layer[layer][head, position] = True

    def of(self, row: int, length: int) -> frozenset[LayerHeadPosition]:
        """Returns the hidden (layer, head, position) places in the first `length` slots of a cache row, as a
        frozenset."""
        by_layer = self._slots.get(row, {}).items()
        return frozenset(
            (layer, head, position)
            for layer, hidden in by_layer
            for head, position in hidden[:, :length].nonzero().tolist()
        )

    def truncate(self, row: int, length: int) -> None:
        """Ends the hiding of a cache row's slots from position `length` on, in all layers and heads."""
        for hidden in self._slots.get(row, {}).values():
            hidden[:, length:] = False
        if not self.of(row, length):
            self._slots.pop(row, None)

    def concern(self, rows: Sequence[int]) -> bool:
        """Returns True if one of these cache rows has slots that are hidden in single layers or heads."""
        return any(row in self._slots for row in rows)

    def hide(self, mask: Tensor, rows: Sequence[int], layer: int) -> None:
        """Hides, in a mask [b, query heads, t, s] of these cache rows, what is hidden in this layer. Changes it in
        place."""
        for b, row in enumerate(rows):
            hidden = self._slots.get(row, {}).get(layer)
            if hidden is not None:
                of_queries = hidden[:, : mask.shape[-1]].repeat_interleave(mask.shape[1] // len(hidden), 0)
                mask[b].masked_fill_(of_queries[:, None].to(mask.device), torch.finfo(mask.dtype).min)

    def added_to(self, hidden: Tensor, layer: int) -> Tensor:
        """Returns the flags `hidden` [rows, h, s] of hidden slots, and with them the slots hidden in single heads of
        the layer."""
        own = hidden.clone()
        for row, by_layer in self._slots.items():
            if layer in by_layer:
                own[row] |= by_layer[layer]
        return own
