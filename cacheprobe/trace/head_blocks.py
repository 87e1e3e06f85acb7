"""Collects activations of attention heads: one tensor for each pass, site and layer, joined at the end of the run.

Patterns are ragged: a row at position p keeps only its weights on positions 0 to p.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN


@dataclass
class HeadBlock:
    """Head activations of one pass, for the rows that are kept."""

    dtype: torch.dtype
    index: Tensor
    """[n]: batch_index x width + slot of each kept row."""
    positions: Tensor
    """[n] absolute positions."""
    held: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def size(self, site: str) -> int:
        """Returns the number of entries of one head: of rows, or of weights of all rows."""
        return len(self.index) if site != PATTERN else int((self.positions + 1).sum())

    def keep(self, site: str, layer: int, value: Tensor) -> None:
        """Copies the kept rows from [b, t, h, d], or from a pattern [b, h, t, s] over the cache's slots."""
        if site == PATTERN:
            width = value.shape[2]
            rows = value[self.index // width, :, self.index % width]  # [n, h, s]
            is_seen = torch.arange(value.shape[3], device=value.device) <= self.positions[:, None]
            taken = rows.masked_select(is_seen[:, None])  # row by row, and head by head in each
        else:
            taken = value.flatten(0, 1)[self.index]
        self.held[site, layer] = taken.to("cpu", self.dtype)


class HeadBlocks:
    """Head activations of a run: sites q, k, v and z as [n, h, d] for each layer, patterns as one flat tensor."""

    def __init__(self, sites: Sequence[str], layers: Sequence[int], dtype: torch.dtype) -> None:
        self.sites, self.layers, self.dtype = tuple(sites), tuple(layers), dtype
        self._passes: list[HeadBlock] = []

    def open(self, index: Tensor, positions: Sequence[int]) -> HeadBlock:
        """Returns a new block for a pass. index, positions: of its kept rows, ordered by batch index, then slot."""
        self._passes.append(HeadBlock(self.dtype, index, torch.tensor(positions, device=index.device)))
        return self._passes[-1]

    def drop_last(self) -> None:
        """Discards the newest pass, which failed."""
        self._passes.pop()

    def joined(self) -> dict[tuple[str, int], Tensor]:
        """Returns [n, h, d] by site and layer, a pattern flat; NaN for a pass that ended before the layer."""
        return {(site, layer): self._joined(site, layer) for site in self.sites for layer in self.layers}

    def _joined(self, site: str, layer: int) -> Tensor:
        held = [(one, one.held.pop((site, layer), None)) for one in self._passes]
        ran = next(((one, tensor) for one, tensor in held if tensor is not None), None)
        if ran is None:
            return torch.empty(0, dtype=self.dtype)
        one, like = ran
        shape = like.shape[1:] if site != PATTERN else ()
        heads = 1 if site != PATTERN else len(like) // one.size(PATTERN)

        def absent(one: HeadBlock) -> Tensor:
            """Returns NaN for a pass that did not reach the layer."""
            return torch.full((heads * one.size(site), *shape), torch.nan, dtype=self.dtype)

        return torch.cat([absent(one) if tensor is None else tensor for one, tensor in held])


def ragged_starts(positions: Tensor, numel: int) -> tuple[Tensor, int]:
    """Returns the offset of each row in a flat pattern, [n + 1], and the number of heads.

    positions: of the rows, in stored order.  numel: entries of the flat pattern.
    Raises: ValueError if the number of entries does not fit these rows.
    """
    lengths = positions + 1
    total = int(lengths.sum())
    if not total or numel % total:
        raise ValueError(f"a pattern of {numel} weights is none of {len(positions)} rows that see {total} positions")
    heads = numel // total
    return torch.cat([torch.zeros(1, dtype=torch.long), (lengths * heads).cumsum(0)]), heads
