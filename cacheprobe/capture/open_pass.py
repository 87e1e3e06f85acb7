"""Holds what a recorder keeps of one forward pass while the pass runs: the chosen rows, and the tensors copied for
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES
from cacheprobe.core.records import RowSlot
from cacheprobe.trace.head_blocks import HeadBlock

_CHECKED_ROWS = 64
"""Maximum number of rows of a pass that are checked, evenly spaced."""


@dataclass
class OpenPass:
    """The tensors that one pass writes into, from `before_forward` to `after_forward`.

    A recorder has one only during an announced pass. The model also runs at other times: to rebuild rows after a
    preemption, and for a drafter's own forwards. Hooks then find no OpenPass, so those values are not recorded.
    """

    kept: list[bool]
    """For each row, whether to keep its states."""
    lens_rows: list[bool]
    """For each row, whether the lens reads it."""
    keep_index: Tensor
    """[n]: batch_index x width + slot of the kept rows."""
    lens_index: Tensor
    checked_index: Tensor
    check_step: int
    layer_index: dict[int, int]
    """Index of each kept layer in the blocks."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """[layers, n, m] by site."""
    heads: HeadBlock | None = None
    lens_block: Tensor | None = None
    """[layers, n, m] of S, for the rows that the lens reads."""
    watched: dict[tuple[str, int], Tensor] | None = None
    """States of the checked rows, by site and layer; None in a pass without a self-check."""

    @classmethod
    def of(
        cls,
        rows: Sequence[RowSlot],
        width: int,
        kept: list[bool],
        lens_rows: list[bool],
        layer_index: dict[int, int],
        device: torch.device,
    ) -> "OpenPass":
        """Returns an OpenPass with the rows of a pass of `width` slots chosen. The caller opens its blocks."""
        flat = torch.tensor([row.batch_index * width + row.slot for row in rows])
        step = -(-len(rows) // _CHECKED_ROWS)
        chosen = (flat[torch.tensor(kept)], flat[torch.tensor(lens_rows)], flat[::step])
        keep, lens, checked = (index.to(device) for index in chosen)
        return cls(kept, lens_rows, keep, lens, checked, step, layer_index)

    def take(self, site: str, layer: int, value: Tensor, device: torch.device) -> None:
        """Copies the wanted rows of a hook's value, [b, t, m] or of heads; keeps no reference to the tensor."""
        if site in HEAD_SITES:
            if self.heads is not None:
                self.heads.keep(site, layer, value)
            return
        flat = value.reshape(-1, value.shape[-1]).to(device)  # layers may lie on several devices
        if self.watched is not None:
            self.watched[site, layer] = flat[self.checked_index]
        index = self.layer_index.get(layer)
        if index is None or site == "pre":
            return
        if site in self.states:
            _take(flat, self.keep_index, self.states[site][index])
        if site == "S" and self.lens_block is not None:
            _take(flat, self.lens_index, self.lens_block[index])


def _take(flat: Tensor, index: Tensor, out: Tensor) -> None:
    """Copies flat[index] to `out`, without an intermediate copy if dtype and device are the same."""
    if flat.dtype == out.dtype and flat.device == out.device:
        torch.index_select(flat.detach(), 0, index, out=out)
    else:
        out.copy_(flat[index])
