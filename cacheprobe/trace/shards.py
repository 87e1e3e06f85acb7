"""Reads the captured states of a saved run from its safetensors files (shards), each vector when it is asked for."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from cacheprobe.core.values import JsonDict
from cacheprobe.ops.state_codec import decode
from cacheprobe.trace.manifest import BLOCK_BYTES, CheckedFiles, TraceError
from cacheprobe.trace.state_store import StateStore, tensor_key

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
    ) -> None:
        super().__init__(sites, heads, layers)
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
            site, layer = key.split(".")
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
