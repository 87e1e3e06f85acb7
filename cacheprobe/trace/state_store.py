"""Stores captured state vectors by (site, layer) in memory. `parts/shards.py` reads those of a saved run.

During a run, one tensor for each pass, site and layer is collected, and joined at the end. Attention patterns are
ragged: a row at position p keeps only its weights on positions 0 to p. Routing is kept in float32: ids of experts stay
exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Protocol, SupportsIndex, runtime_checkable

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, PATTERN, RECURRENT, ROUTER, SITES
from cacheprobe.ops.state_codec import SCALE_BYTES, decode, encode


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


_EXACT = (PATTERN, ROUTER)
"""Sites whose numbers are not rounded to int8."""


def _dtype(site: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if site == ROUTER else dtype


@dataclass
class HeadBlock:
    """Holds the activations of attention heads that were captured in one pass, by (site, layer)."""

    dtype: torch.dtype
    index: Tensor
    """[n]: for each kept row, batch index x width + token slot, with width the number of token slots of the pass."""
    positions: Tensor
    """[n] absolute positions of the kept rows."""
    is_int8: bool = False
    """Whether activations are rounded to int8, one scale for each head, except routing, and patterns, whose weights are
    mostly near zero."""
    activations: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def size(self, site: str) -> int:
        """Returns the number of kept rows of this pass. At site "pattern", returns the number of their weights per
        head, p + 1 for a row at position p."""
        return len(self.index) if site != PATTERN else int((self.positions + 1).sum())

    def keep(self, site: str, layer: int, value: Tensor) -> None:
        """Copies the head activations of the kept rows, at one site and layer, into this block, on the CPU.

        value: [b, t, h, d]; for routing, [b, t, k, 2]; for a pattern, [b, h, t, s] over all cache slots, of which
        only slots 0 to p are kept.
        """
        if site == PATTERN:
            width = value.shape[2]
            weights = value[self.index // width, :, self.index % width]  # [n, h, s]
            is_seen = torch.arange(value.shape[3], device=value.device) <= self.positions[:, None]
            kept = weights.masked_select(is_seen[:, None])  # in order of row, then head
        else:
            kept = value.flatten(0, 1)[self.index]
        kept = kept.to("cpu", _dtype(site, self.dtype))
        self.activations[site, layer] = encode(kept) if self.is_int8 and site not in _EXACT else kept

    def part(self, chosen: Sequence[int]) -> "HeadBlock":
        """Returns a copy of the activations of some rows. chosen: indices of kept rows."""
        index = torch.tensor(chosen, dtype=torch.long)
        part = HeadBlock(self.dtype, self.index[index], self.positions[index], self.is_int8)
        for (site, layer), kept in self.activations.items():
            if site == PATTERN:
                starts, _ = ragged_starts(self.positions.cpu(), len(kept))
                part.activations[site, layer] = torch.cat(
                    [kept[:0], *(kept[starts[i] : starts[i + 1]] for i in chosen)]
                )
            else:
                part.activations[site, layer] = kept[index]
        return part


class HeadBlocks:
    """Collects the activations of attention heads of a run, pass by pass: q, k, v and z as [n, h, d], patterns flat."""

    def __init__(
        self, sites: Sequence[str], layers: Sequence[int], dtype: torch.dtype, *, is_int8: bool = False
    ) -> None:
        self.sites, self.layers, self.dtype, self.is_int8 = tuple(sites), tuple(layers), dtype, is_int8
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
        """Returns a new, empty HeadBlock for the pass that begins.

        index: batch index x width + slot of each kept row, ascending.  positions: absolute positions of these rows.
        """
        return HeadBlock(self.dtype, index, torch.tensor(positions, device=index.device), self.is_int8)

    def append(self, block: HeadBlock) -> None:
        """Adds the activations of some rows of a pass."""
        self._passes.append(block)

    def drop_last(self) -> None:
        """Discards the head activations that were appended last, because their pass failed."""
        self._passes.pop()

    def joined(self) -> dict[tuple[str, int], Tensor]:
        """Returns a dict (site, layer) -> head activations of all passes since the last call, joined: [n, h, d]; a
        pattern as one flat tensor. Forgets them.

        Rows of a pass that ended before the layer are NaN; if no pass has reached the layer yet, the tensor is empty.
        Routing of a layer without experts is NaN, and so is the recurrent state of a layer without one.
        """
        for partial_site in (ROUTER, RECURRENT):
            kept = (o for block in self._passes for (site, _), o in block.activations.items() if site == partial_site)
            if (example := next(kept, None)) is not None:
                for layer in self.layers:
                    self.shapes.setdefault((partial_site, layer), (example.shape[1:], 1))
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
            return torch.empty(0, dtype=_dtype(site, self.dtype))
        shape, heads = self.shapes[site, layer]

        def absent(block: HeadBlock) -> Tensor:
            """Returns NaN in the shape of one pass's head activations, for a pass that did not reach the layer."""
            if self.is_int8 and site not in _EXACT:
                return encode(torch.full((block.size(site), *shape[:-1], shape[-1] - SCALE_BYTES), torch.nan))
            return torch.full((heads * block.size(site), *shape), torch.nan, dtype=_dtype(site, self.dtype))

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
