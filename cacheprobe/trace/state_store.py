"""Stores captured state vectors by (site, layer): in memory, or in safetensors files that are opened when needed."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import index
from typing import Protocol, SupportsIndex, runtime_checkable

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, SITES
from cacheprobe.core.values import JsonDict
from cacheprobe.ops.state_codec import decode
from cacheprobe.trace.checked_files import CheckedFiles
from cacheprobe.trace.manifest import TraceError


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


class ShardStore:
    """Reads the captured states of a saved run from its safetensors files (shards), each tensor at its first use."""

    def __init__(
        self,
        files: CheckedFiles,
        shards: Sequence[str],
        sites: Sequence[str],
        layers: Sequence[int],
        heads: Sequence[str] = (),
    ) -> None:
        self.sites, self.layers, self.heads = tuple(sites), tuple(layers), tuple(heads)
        self.files, self.shards = files, tuple(shards)
        self._loaded: dict[str, Tensor] = {}

    @cached_property
    def _places(self) -> dict[str, list[tuple[str, JsonDict]]]:
        """By name of a tensor: each file that holds a part of the tensor, with the file's entry of the part."""
        places: dict[str, list[tuple[str, JsonDict]]] = {}
        for shard in self.shards:
            for key, entry in header_of(self.files, shard).items():
                places.setdefault(key, []).append((shard, entry))
        return places

    def all_of(self, site: str, layer: int) -> Tensor:
        """Returns every stored vector of one site and layer as floats; shapes as in `StateStore.all_of`. Raises:
        TraceError as `stored`."""
        return decode(self.stored(site, layer))

    def stored(self, site: str, layer: int) -> Tensor:
        """Returns every vector of one site and layer as it is stored. Reads the file at the first call, and keeps the
        tensor in memory. Raises: TraceError if the bytes of the tensor, or of the file's header, differ from their
        checksums."""
        key = tensor_key(site, layer)
        if key not in self._loaded:
            if key not in self._places:
                raise TraceError(f"{self.files.directory} holds no states of site {site}, layer {layer}; run it again")
            parts = [read_tensor(self.files, *place) for place in self._places[key]]
            parts = [part for part in parts if part.numel()] or parts[:1]
            self._loaded[key] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._loaded[key]


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool
}  # fmt: skip
"""Dtypes by their names in a safetensors file."""


def header_of(files: CheckedFiles, name: str) -> dict[str, JsonDict]:
    """Returns the entries (dtype, shape, data_offsets) of the tensors of a safetensors file, by name; data_offsets
    count from the beginning of the file. Raises: TraceError if the file is damaged."""
    with files.naming(name):
        length = 8 + int.from_bytes(files.read(name, 0, min(8, files.sizes[name])).tobytes(), "little")
        if not 8 < length <= files.sizes[name]:
            raise ValueError(f"its header would be {length - 8} bytes long")
        entries = json.loads(files.read(name, 8, length).tobytes())
        for entry in entries.values():
            entry["data_offsets"] = [length + offset for offset in entry["data_offsets"]]
        return entries


def read_tensor(files: CheckedFiles, name: str, entry: JsonDict) -> Tensor:
    """Reads one tensor of a safetensors file. entry: as from `header_of`. Raises: TraceError if the bytes of the tensor
    differ from their checksums."""
    with files.naming(name):
        data = torch.from_numpy(files.read(name, *entry["data_offsets"]))
        return data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


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
        """Bytes of the states that the next call of `joined` returns."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    def joined(self) -> dict[tuple[str, int], Tensor]:
        """Returns a dict (site, layer) -> states of all passes since the last call as one tensor [n, m], and forgets
        them. The memory of each site is freed after joining."""
        states: dict[tuple[str, int], Tensor] = {}
        self._counts.clear()
        for site in self.sites:
            blocks, self._blocks[site] = self._blocks[site], []
            for layer, i in self.layer_index.items():
                parts = [block[i] for block in blocks]
                states[site, layer] = torch.cat(parts) if parts else torch.empty(0, 0, dtype=self.dtype)
        return states
