"""Hides cache slots from later tokens in chosen layers and heads only, for cache surgery."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

LayerHeadPosition = tuple[int, int, int]
"""(layer, head of keys and values, position) at which a cache slot is hidden."""


class HeadMasks:
    """Holds which slots no later token attends to, by cache row, layer and head, and keeps the mask tensors of the
    current forward up to date.

    A model takes one mask for all its layers. Each layer writes to the cache before it attends; at that moment the mask
    tensor is updated in place for this layer.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: dict[int, dict[int, Tensor]] = {}  # cache row -> layer -> [h, s]
        self._masks: list[tuple[Tensor, Tensor]] = []  # (mask that the model uses, mask without hidden heads)
        self._rows: Sequence[int] = ()

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

    def follow(self, mask: Tensor, rows: Sequence[int], num_heads: int) -> Tensor:
        """Returns a copy [b, num_heads, t, s] of the mask, to pass to the model instead; `enter` then updates the copy
        for each layer.

        mask: [b, 1, t, s] of the staged cache rows `rows`.  num_heads: number of query heads.
        """
        own = mask.expand(-1, num_heads, -1, -1).clone()
        self._masks.append((own, mask))
        self._rows = rows
        return own

    def enter(self, layer: int) -> None:
        """Updates the masks that `follow` returned, in place, for the layer that attends next."""
        for own, plain in self._masks:
            own.copy_(plain.expand_as(own))
            for b, row in enumerate(self._rows):
                hidden = self._slots.get(row, {}).get(layer)
                if hidden is not None:
                    hidden_of_queries = hidden[:, : own.shape[-1]].repeat_interleave(own.shape[1] // len(hidden), 0)
                    own[b].masked_fill_(hidden_of_queries[:, None].to(own.device), torch.finfo(own.dtype).min)

    def added_to(self, hidden: Tensor, layer: int) -> Tensor:
        """Returns the flags `hidden` [rows, h, s] of hidden slots, and with them the slots hidden in single heads of
        the layer."""
        own = hidden.clone()
        for row, by_layer in self._slots.items():
            if layer in by_layer:
                own[row] |= by_layer[layer]
        return own

    def leave(self) -> None:
        """Forgets the masks that `follow` returned, at the end of a forward."""
        self._masks.clear()
