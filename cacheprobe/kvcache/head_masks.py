"""Slots that no later token attends to in some layers or heads alone."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Place = tuple[int, int, int]
"""(layer, head of keys and values, position)."""


class HeadMasks:
    """Which slots of which cache row are hidden where, and the masks of the forward at hand.

    A model takes one mask for all of its layers. Each layer writes to the cache before it attends, so that is where
    the mask of that forward, a tensor of ours, is set for the layer.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._slots: dict[int, dict[int, Tensor]] = {}  # row -> layer -> [h, s]
        self._masks: list[tuple[Tensor, Tensor]] = []  # what the model was given, and what it says without us
        self._rows: Sequence[int] = ()

    def put(self, row: int, places: Iterable[Place], heads: Sequence[int]) -> None:
        """Hide these places of a row, and nothing else of it.  heads: of keys and values, of each layer."""
        self._slots.pop(row, None)
        for layer, head, position in places:
            of_row = self._slots.setdefault(row, {})
            if layer not in of_row:
                of_row[layer] = torch.zeros(heads[layer], self._capacity, dtype=torch.bool)
            of_row[layer][head, position] = True

    def of(self, row: int, length: int) -> frozenset[Place]:
        """What is hidden of a row's first positions."""
        held = self._slots.get(row, {}).items()
        return frozenset((layer, *place) for layer, hidden in held for place in hidden[:, :length].nonzero().tolist())

    def truncate(self, row: int, length: int) -> None:
        """Forget the slots from `length` on."""
        for hidden in self._slots.get(row, {}).values():
            hidden[:, length:] = False
        if not self.of(row, length):
            self._slots.pop(row, None)

    def concern(self, rows: Sequence[int]) -> bool:
        """Whether anything of these rows is hidden in a part alone."""
        return any(row in self._slots for row in rows)

    def follow(self, mask: Tensor, rows: Sequence[int], num_heads: int) -> Tensor:
        """The mask to hand to the model, [b, num_heads, t, s], which `enter` then sets for each layer.

        mask: [b, 1, t, s] of the staged rows.  num_heads: of the queries.
        """
        own = mask.expand(-1, num_heads, -1, -1).clone()
        self._masks.append((own, mask))
        self._rows = rows
        return own

    def enter(self, layer: int) -> None:
        """This layer attends next."""
        for own, plain in self._masks:
            own.copy_(plain.expand_as(own))
            for b, row in enumerate(self._rows):
                hidden = self._slots.get(row, {}).get(layer)
                if hidden is not None:
                    of_queries = hidden[:, : own.shape[-1]].repeat_interleave(own.shape[1] // len(hidden), 0)
                    own[b].masked_fill_(of_queries[:, None].to(own.device), torch.finfo(own.dtype).min)

    def leave(self) -> None:
        """The forward is over."""
        self._masks.clear()
