"""Collects activations of attention heads during a run: one tensor for each pass, site and layer, joined at the end.

Patterns are ragged: a row at position p keeps only its weights on positions 0 to p.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheprobe.core.hook_names import PATTERN


@dataclass
class HeadBlock:
    """Holds the activations of attention heads that were captured in one pass, by (site, layer)."""

    dtype: torch.dtype
    index: Tensor
    """[n]: for each kept row, batch index x width + token slot, with width the number of token slots of the pass."""
    positions: Tensor
    """[n] absolute positions of the kept rows."""
    activations: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def size(self, site: str) -> int:
        """Returns the number of kept rows of this pass. At site "pattern", returns the number of their weights per
        head, p + 1 for a row at position p."""
        return len(self.index) if site != PATTERN else int((self.positions + 1).sum())

    def keep(self, site: str, layer: int, value: Tensor) -> None:
        """Copies the head activations of the kept rows, at one site and layer, into this block, on the CPU.

        value: [b, t, h, d]; for a pattern, [b, h, t, s] over all cache slots, of which only slots 0 to p are kept.
        """
        if site == PATTERN:
            width = value.shape[2]
            weights = value[self.index // width, :, self.index % width]  # [n, h, s]
            is_seen = torch.arange(value.shape[3], device=value.device) <= self.positions[:, None]
            kept = weights.masked_select(is_seen[:, None])  # in order of row, then head
        else:
            kept = value.flatten(0, 1)[self.index]
        self.activations[site, layer] = kept.to("cpu", self.dtype)


class HeadBlocks:
    """Collects the activations of attention heads of a run, pass by pass: q, k, v and z as [n, h, d], patterns flat."""

    def __init__(self, sites: Sequence[str], layers: Sequence[int], dtype: torch.dtype) -> None:
        self.sites, self.layers, self.dtype = tuple(sites), tuple(layers), dtype
        self._passes: list[HeadBlock] = []
        self.shapes: dict[tuple[str, int], tuple[tuple[int, ...], int]] = {}
        """By (site, layer), from a pass that reached the layer: the shape of a row's activations, and the number of
        heads of a pattern."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the activations that the next call of `joined` returns, without passes that did not reach a
        layer."""
        return sum(tensor.nbytes for block in self._passes for tensor in block.activations.values())

    def open(self, index: Tensor, positions: Sequence[int]) -> HeadBlock:
        """Adds a new, empty HeadBlock for the pass that begins, and returns that block.

        index: batch index x width + slot of each kept row, ascending.  positions: absolute positions of these rows.
        """
        self._passes.append(HeadBlock(self.dtype, index, torch.tensor(positions, device=index.device)))
        return self._passes[-1]

    def drop_last(self) -> None:
        """Discards the head activations of the newest pass, because that pass failed."""
        self._passes.pop()

    def joined(self) -> dict[tuple[str, int], Tensor]:
        """Returns a dict (site, layer) -> head activations of all passes since the last call, joined: [n, h, d]; a
        pattern as one flat tensor. Forgets them.

        Rows of a pass that ended before the layer are NaN; if no pass has reached the layer yet, the tensor is empty.
        """
        joined = {(site, layer): self._joined(site, layer) for site in self.sites for layer in self.layers}
        self._passes = []
        return joined

    def _joined(self, site: str, layer: int) -> Tensor:
        """Returns the activations of one site and layer, joined over the passes, and frees those of the passes."""
        by_pass = [(block, block.activations.pop((site, layer), None)) for block in self._passes]
        ran = next(((block, tensor) for block, tensor in by_pass if tensor is not None), None)
        if ran is not None:
            block, example = ran
            heads = 1 if site != PATTERN else len(example) // block.size(PATTERN)
            self.shapes[site, layer] = example.shape[1:] if site != PATTERN else (), heads
        if (site, layer) not in self.shapes or not by_pass:
            return torch.empty(0, dtype=self.dtype)
        shape, heads = self.shapes[site, layer]

        def absent(block: HeadBlock) -> Tensor:
            """Returns NaN in the shape of one pass's head activations, for a pass that did not reach the layer."""
            return torch.full((heads * block.size(site), *shape), torch.nan, dtype=self.dtype)

        return torch.cat([absent(block) if tensor is None else tensor for block, tensor in by_pass])


def ragged_starts(positions: Tensor, numel: int) -> tuple[Tensor, int]:
    """Returns (offsets [n + 1], number of heads) of a flat tensor of attention patterns: row i is flat[offsets[i] :
    offsets[i + 1]].

    positions: of the n rows, in stored order; a row at position p has p + 1 weights for each head.  numel: size of the
    flat tensor.
    Raises: ValueError if there are no rows, or if the size does not fit them.
    """
    lengths = positions + 1
    total = int(lengths.sum())
    if not total or numel % total:
        raise ValueError(f"a pattern of {numel} weights is none of {len(positions)} rows that see {total} positions")
    heads = numel // total
    return torch.cat([torch.zeros(1, dtype=torch.long), (lengths * heads).cumsum(0)]), heads
