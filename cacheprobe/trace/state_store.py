"""Stores captured state vectors by (site, layer) in memory. `parts/shards.py` reads those of a saved run."""

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Protocol, SupportsIndex, runtime_checkable

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, SITES
from cacheprobe.ops.state_codec import decode


@runtime_checkable
class StateStore(Protocol):
    """Defines the interface of a store of captured states: one tensor [n, m] for each (site, layer).

    The n vectors of every tensor are in the order of `state_index` in the rows table.
    """

    sites: tuple[str, ...]
    heads: tuple[str, ...]
    """Sites of attention heads: [n, h, d] each. A pattern is flat: row by row, the weights [h, p + 1] of position p."""
    layers: tuple[int, ...]

    def stored(self, site: str, layer: int) -> Tensor:
        """Returns every vector of one site and layer as it is stored; see `state_codec.encode` for int8."""
        ...

    def all_of(self, site: str, layer: int) -> Tensor:
        """Returns every stored vector of one site and layer: [n, m]; [n, h, d] at sites q, k, v and z; a pattern flat,
        as in `StateStore.heads`. Floats: of a run whose states are int8, float32."""
        ...

    def some_of(self, site: str, layer: int, indices: Tensor) -> Tensor:
        """Returns the stored vectors at `indices` [n] of `all_of`; not for patterns."""
        ...

    def num_rows(self) -> int:
        """Number n of stored vectors of a site and layer; 0 without sites."""
        ...


class MemoryStore:
    """Holds the captured states of a run in memory: by (site, layer), one tensor with the states of all kept rows."""

    def __init__(self, states: Mapping[tuple[str, int], Tensor]) -> None:
        self._states = dict(states)
        captured = {site for site, _ in states}
        self.sites = tuple(site for site in SITES if site in captured)
        self.heads = tuple(site for site in HEAD_SITES if site in captured)
        self.layers = tuple(sorted({layer for _, layer in states}))

    def stored(self, site: str, layer: int) -> Tensor:
        """Returns every vector of one site and layer as it is stored."""
        return self._states[site, layer]

    def all_of(self, site: str, layer: int) -> Tensor:
        """Returns every stored vector of one site and layer as floats; shapes as in `StateStore.all_of`."""
        return decode(self.stored(site, layer))

    def some_of(self, site: str, layer: int, indices: Tensor) -> Tensor:
        """Returns the stored vectors at `indices` [n] of `all_of`; not for patterns."""
        return decode(self.stored(site, layer)[indices])

    def num_rows(self) -> int:
        """Number n of stored vectors of a site and layer; 0 without sites."""
        return len(self.stored(self.sites[0], self.layers[0])) if self.sites else 0


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


class Blocks:
    """Collects captured states during a run: a tensor [layers, n, m] for each pass and site, joined at the end.

    Hooks copy into the tensor of the current pass, so no stored state shares memory with the model.
    """

    def __init__(self, sites: Sequence[str], layers: Sequence[int], dtype: torch.dtype) -> None:
        self.sites, self.layers, self.dtype = tuple(sites), tuple(layers), dtype
        self.layer_index = {layer: i for i, layer in enumerate(layers)}
        self.num_rows = 0
        self._counts: list[int] = []
        """Number of rows of each appended block."""
        self._blocks: dict[str, list[Tensor]] = {site: [] for site in sites}

    def open(self, num_rows: int, width: int) -> dict[str, Tensor]:
        """Returns a dict site -> new tensor [layers, num_rows, width] for the pass that begins, filled with NaN: a
        layer that does not run in this pass stays NaN."""
        return {s: torch.full((len(self.layers), num_rows, width), torch.nan, dtype=self.dtype) for s in self.sites}

    def append(self, num_rows: int, states: Mapping[str, Tensor]) -> None:
        """Adds the states of `num_rows` rows, by site: [layers, num_rows, m], or as from `state_codec.encode`."""
        for site, block in states.items():
            self._blocks[site].append(block)
        self._counts.append(num_rows)
        self.num_rows += num_rows

    def drop_last(self) -> None:
        """Discards the states that were appended last, because their pass failed."""
        self.num_rows -= self._counts.pop()
        for blocks in self._blocks.values():
            blocks.pop()

    @property
    def num_bytes(self) -> int:
        """Bytes of the states that the next call of `take` takes."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    def take(self) -> Callable[[], dict[tuple[str, int], Tensor]]:
        """Takes the states of all passes since the last call. Returns a function that joins them, in any thread, to a
        dict (site, layer) -> one tensor [n, m]. It is called once: the memory of each site is freed after joining."""
        taken, self._blocks = self._blocks, {site: [] for site in self.sites}
        self._counts.clear()

        def join() -> dict[tuple[str, int], Tensor]:
            """Joins the taken states, and frees them."""
            states: dict[tuple[str, int], Tensor] = {}
            for site in self.sites:
                blocks = taken.pop(site)
                for layer, i in self.layer_index.items():
                    parts = [block[i] for block in blocks]
                    states[site, layer] = torch.cat(parts) if parts else torch.empty(0, 0, dtype=self.dtype)
            return states

        return join
