"""Stores captured state vectors by (site, layer): in memory, or, of a saved run, in its safetensors files (shards), of
which each vector is read when it is asked for.

Attention patterns are ragged: a row at position p keeps only its weights on positions 0 to p.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from operator import index
from types import MappingProxyType
from typing import SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEAD_SITES, SITES, is_module
from cacheprobe.core.values import JsonDict
from cacheprobe.ops.state_codec import decode
from cacheprobe.trace.manifest import BLOCK_BYTES, CheckedFiles, TraceError


class StateStore:
    """Stores captured states: one tensor [n, m] for each (site, layer).

    The n vectors of every tensor are in the order of `state_index` in the rows table.
    """

    def __init__(
        self, sites: Sequence[str], heads: Sequence[str], layers: Sequence[int], modules: Mapping[str, int]
    ) -> None:
        self.sites, self.layers = tuple(sites), tuple(layers)
        self.modules = dict(modules)
        """Layer of each captured module, by its name: [n, ...] each."""
        self.heads = tuple(heads)
        """Sites of attention heads: [n, h, d] each. A pattern is flat: row by row, the weights [h, p + 1] of position
        p."""

    @property
    def places(self) -> list[tuple[str, int]]:
        """(site, layer) of all that is stored: sites, heads, then modules."""
        return [*product((*self.sites, *self.heads), self.layers), *self.modules.items()]

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
        layers = {layer for site, layer in states if not is_module(site)}
        super().__init__(sites, heads, sorted(layers), {site: at for site, at in states if is_module(site)})

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


KEPT_BYTES = 2**30
"""Most bytes of states that a store keeps in memory after they were asked for; a larger tensor is kept alone."""


class ShardStore(StateStore):
    """Reads the stored vectors that are asked for. A tensor of which as many bytes were read in pieces as it has is
    then read whole, and kept in memory."""

    def __init__(
        self,
        files: CheckedFiles,
        shards: Sequence[str],
        sites: Sequence[str],
        layers: Sequence[int],
        heads: Sequence[str] = (),
        modules: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(sites, heads, layers, modules)
        self.files, self.shards = files, tuple(shards)
        self._kept: dict[str, Tensor] = {}
        """Whole tensors by name, the one that was used last at the end."""
        self._bytes_read: Counter[str] = Counter()
        """By name of a tensor: bytes that were read in pieces."""

    @cached_property
    def _places(self) -> dict[str, list[tuple[str, JsonDict]]]:
        """By name of a tensor: each file that holds vectors of it, with the file's entry; one file if there are no
        vectors."""
        places: dict[str, list[tuple[str, JsonDict]]] = {}
        for shard in self.shards:
            for key, entry in header_of(self.files, shard).items():
                places.setdefault(key, []).append((shard, entry))
        return {key: [p for p in found if 0 not in p[1]["shape"]] or found[:1] for key, found in places.items()}

    def _places_of(self, key: str) -> list[tuple[str, JsonDict]]:
        """Returns the files of a tensor. Raises: TraceError if there is no such tensor."""
        if key not in self._places:
            site, _, layer = key.rpartition(".")
            raise TraceError(f"{self.files.directory} holds no states of site {site}, layer {layer}; run it again")
        return self._places[key]

    def stored(self, site: str, layer: int) -> Tensor:
        """Returns every vector of one site and layer as it is stored. Raises: TraceError if the bytes of the tensor, or
        of the file's header, differ from their checksums."""
        key = tensor_key(site, layer)
        whole = self._kept.pop(key, None)
        if whole is None:
            parts = [read_tensor(self.files, *place) for place in self._places_of(key)]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._kept[key] = whole
        while len(self._kept) > 1 and sum(tensor.nbytes for tensor in self._kept.values()) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return whole

    def some_of(self, site: str, layer: int, indices: Tensor) -> Tensor:
        """Returns the stored vectors at `indices` [n] of `all_of`; not for patterns. Reads the blocks of the files that
        hold them. Raises: IndexError for an index without a vector; TraceError as `stored`.

        Twin: all_of, the same bits.
        """
        key = tensor_key(site, layer)
        places = self._places_of(key)
        size = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for _, entry in places)
        if key in self._kept or self._bytes_read[key] >= size:
            return decode(self.stored(site, layer)[indices])
        if not len(indices):
            return decode(torch.empty(0, *places[0][1]["shape"][1:], dtype=_DTYPES[places[0][1]["dtype"]]))
        distinct, of_index = indices.unique(return_inverse=True)
        vectors, first = [], 0
        for shard, entry in places:
            count = entry["shape"][0]
            own = distinct[(distinct >= first) & (distinct < first + count)] - first
            for run in _runs(own, entry):
                vectors.append(read_tensor(self.files, shard, piece := _piece(entry, int(run[0]), int(run[-1]) + 1)))
                vectors[-1] = vectors[-1][run - run[0]]
                self._bytes_read[key] += BLOCK_BYTES + piece["data_offsets"][1] - piece["data_offsets"][0]
            first += count
        if sum(map(len, vectors)) < len(distinct):
            raise IndexError(f"stored states have indices 0 to {first - 1}, got {distinct.tolist()!s:.80}")
        return decode(torch.cat(vectors)[of_index])


def _runs(indices: Tensor, entry: JsonDict) -> Iterator[Tensor]:
    """Yields ascending indices of vectors in runs: between two runs, more than a block of bytes is not asked for."""
    start, stop = entry["data_offsets"]
    far = max(BLOCK_BYTES * entry["shape"][0] // max(stop - start, 1), 1)
    cuts = (indices.diff() > far).nonzero().flatten() + 1
    yield from (run for run in indices.tensor_split(cuts) if len(run))


def _piece(entry: JsonDict, first: int, end: int) -> JsonDict:
    """Returns the entry of the vectors first..end-1 of a tensor in a safetensors file."""
    start, stop = entry["data_offsets"]
    width = (stop - start) // entry["shape"][0]
    offsets = [start + first * width, start + end * width]
    return {**entry, "shape": [end - first, *entry["shape"][1:]], "data_offsets": offsets}


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


def read_tensors(files: CheckedFiles, name: str, keys: "Sequence[str] | None" = None) -> dict[str, Tensor]:
    """Reads some tensors of a safetensors file by their names; all if `keys` is None. Raises: as `read_tensor`."""
    entries = header_of(files, name)
    return {key: read_tensor(files, name, entries[key]) for key in (entries if keys is None else keys)}


def read_tensor(files: CheckedFiles, name: str, entry: JsonDict) -> Tensor:
    """Reads one tensor of a safetensors file. entry: as from `header_of`. Raises: TraceError if the bytes of the tensor
    differ from their checksums."""
    with files.naming(name):
        data = torch.from_numpy(files.read(name, *entry["data_offsets"]))
        return data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
