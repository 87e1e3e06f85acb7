"""Stores captured state vectors by (site, layer) in memory. `shards.py` reads those of a saved run.

Attention patterns are ragged: a row at position p keeps only its weights on positions 0 to p.
"""

from collections.abc import Mapping, Sequence
from operator import index
from typing import SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, SITES
from cacheprobe.ops.state_codec import decode


class StateStore:
    """Stores captured states: one tensor [n, m] for each (site, layer).

    The n vectors of every tensor are in the order of `state_index` in the rows table.
    """

    def __init__(self, sites: Sequence[str], heads: Sequence[str], layers: Sequence[int]) -> None:
        self.sites, self.layers = tuple(sites), tuple(layers)
        self.heads = tuple(heads)
        """Sites of attention heads: [n, h, d] each. A pattern is flat: row by row, the weights [h, p + 1] of position
        p."""

    def stored(self, site: str, layer: int) -> Tensor:
        """Returns every vector of one site and layer as it is stored; see `state_codec.encode` for int8."""
        raise NotImplementedError

    def all_of(self, site: str, layer: int) -> Tensor:
        """Returns every stored vector of one site and layer: [n, m]; [n, h, d] at sites q, k, v and z; a pattern flat,
        as in `StateStore.heads`. Floats: of a run whose states are int8, float32."""
        return decode(self.stored(site, layer))

    def some_of(self, site: str, layer: int, indices: Tensor) -> Tensor:
        """Returns the stored vectors at `indices` [n] of `all_of`; not for patterns."""
        return decode(self.stored(site, layer)[indices])


class MemoryStore(StateStore):
    """Holds the captured states of a run in memory: by (site, layer), one tensor with the states of all kept rows."""

    def __init__(self, states: Mapping[tuple[str, int], Tensor]) -> None:
        self._states = dict(states)
        captured = {site for site, _ in states}
        sites, heads = ([site for site in of_kind if site in captured] for of_kind in (SITES, HEAD_SITES))
        super().__init__(sites, heads, sorted({layer for _, layer in states}))

    def stored(self, site: str, layer: int) -> Tensor:
        """Returns every vector of one site and layer as it is stored."""
        return self._states[site, layer]


def tensor_key(site: str, layer: int) -> str:
    """Returns the name of a site and layer in the safetensors files, such as "S.3"."""
    return f"{site}.{layer}"


def layer_number(layer: SupportsIndex, rows: pd.DataFrame) -> int:
    """Returns the layer number counted from 0. A negative `layer` counts from the last layer that ran for any of the
    given rows.

    A negative number beyond the first layer is returned unchanged.
    """
    number = index(layer)
    depth = int(rows.num_layers.max()) if number < 0 and len(rows) else 0
    return number + depth if number >= -depth else number


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
