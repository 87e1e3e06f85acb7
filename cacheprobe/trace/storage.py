"""Saves and loads runs in the only on-disk format: safetensors shards, Parquet tables, and a manifest written last.

    run/
      manifest.json                  written last: names the files of the run, with sizes and checksums
      states-<id>-00000.safetensors  one tensor [n, m] for each (site, layer), shards of about 1 GB; of attention heads
                                     [n, h, d], and of patterns one flat tensor (see StateStore.heads). int8: 4 numbers
                                     more in each vector, the bytes of its scale (see state_codec.py)
      rows-<id>.parquet, hypotheses-<id>.parquet, events-<id>.parquet, ledger-<id>.parquet, tokens-<id>.parquet
      features-<id>.parquet          if features of a dictionary were recorded
      thoughts-<id>.parquet and .safetensors  of a Thinking States model
      head_rows-<id>.parquet         and others with head_: of a drafter's head

Every file is written in a temporary folder, flushed to the disk and renamed. File names carry an id. So saving over a
run leaves the old one complete until the new manifest replaces the old. Then the files that the old manifest names are
deleted. Only one process at a time saves in a directory (see places.py).
"""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from itertools import chain, count
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from cacheprobe import __version__
from cacheprobe.core.files import fsync
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.core.values import JsonDict
from cacheprobe.tasks import example_from_record, example_record
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.manifest import FORMAT_VERSION, HEAD, MANIFEST, checksums_of, sha256_of_manifest
from cacheprobe.trace.places import Recording, recording
from cacheprobe.trace.state_store import ShardStore, StateStore, tensor_key
from cacheprobe.trace.tables.schema import arrow_table

ROW_GROUP = 2**14
"""Lines of a Parquet row group. Reading one request of a long run then reads little more than its own lines."""


def parquet_options(schema: pa.Schema) -> JsonDict:
    """Returns the options with which a table of this schema is written as Parquet.

    Dictionaries make floats larger, because few repeat; their bytes are split by place and compressed instead. Numbers
    and types stay, so every reader of Parquet reads the same bits.
    """
    paths = {}
    for column in schema:
        is_list = pa.types.is_list(column.type)
        paths[f"{column.name}.list.element" if is_list else column.name] = (
            column.type.value_type if is_list else column.type
        )
    floats = [path for path, kind in paths.items() if pa.types.is_floating(kind)]
    return {
        "compression": "zstd",
        "use_dictionary": [path for path in paths if path not in floats],
        "use_byte_stream_split": floats or False,
    }


def write_parquet(pieces: "Iterable[pd.DataFrame | pa.Table]", path: "Path | BytesIO", name: str) -> None:
    """Writes the pieces of a table of a run, one after the other, as one Parquet file. path: or an open file.  name: of
    the table in `schema.TABLES`."""
    tables = (piece if isinstance(piece, pa.Table) else arrow_table(piece, name) for piece in pieces)
    first = next(tables)
    with pq.ParquetWriter(path, first.schema, **parquet_options(first.schema)) as writer:
        for table in chain([first], tables):
            writer.write_table(table, row_group_size=ROW_GROUP)


class RunFiles:
    """Writes files of one run into a directory, and holds their sizes and checksums by name.

    staging: an empty folder on the same file system, for files that are not whole yet.  prefix: of the files' names.
    """

    def __init__(self, directory: Path, staging: Path, run_id: str, prefix: str = "") -> None:
        self.directory, self.staging, self.run_id, self.prefix = directory, staging, run_id, prefix
        self.sizes: dict[str, int] = {}
        self.blocks: dict[str, str] = {}

    @classmethod
    def of(cls, place: Recording) -> "RunFiles":
        """Returns the writer of the files of the run that is written in a directory."""
        return cls(place.directory, place.staging, place.run_id)

    def of_head(self) -> "RunFiles":
        """Returns the writer of the files of the drafter's head, which count among those of this one."""
        files = RunFiles(self.directory, self.staging, self.run_id, HEAD)
        files.sizes, files.blocks = self.sizes, self.blocks
        return files

    def name(self, kind: str, ending: str = "parquet", number: int | None = None) -> str:
        """Returns the name of a file, such as "rows-<id>.parquet". number: of a part or a shard."""
        return f"{self.prefix}{kind}-{self.run_id}{'' if number is None else f'-{number:05d}'}.{ending}"

    @property
    def checksums(self) -> JsonDict:
        """Sizes of the written files, and checksums of their blocks, as in a manifest."""
        return {"files": {**self.sizes}, "blocks": {**self.blocks}}

    def clear(self) -> None:
        """Forgets the sizes and checksums of the files written so far."""
        self.sizes.clear()
        self.blocks.clear()

    def write(self, name: str, fill: Callable[[Path], object]) -> str:
        """Calls `fill` on a path of its own, flushes that file to the disk, gives it its name, and returns the name."""
        self._write_whole(name, fill)
        self.sizes[name], self.blocks[name] = checksums_of(self.directory / name)
        return name

    def write_table(self, name: str, pieces: "Iterable[pd.DataFrame | pa.Table]", schema: str) -> str:
        """Writes the pieces of a table as one Parquet file, and returns its name. schema: of `tables.schema.TABLES`."""
        return self.write(name, lambda path: write_parquet(pieces, path, schema))

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> str:
        """Writes tensors as one safetensors file, and returns its name."""
        from safetensors.torch import save_file

        return self.write(name, lambda path: save_file(dict(tensors), path))

    def write_manifest(self, about: JsonDict) -> None:
        """Writes manifest.json, which makes these files the run of the directory.

        about: the lists `sites`, `heads` and `layers` of its states; `requests`, as from `storage.request_record`, with
        the committed tokens and the text; `meta`; `head`, the lists and `meta` of the drafter's head if it has one.
        """
        manifest = {
            "format": "cacheprobe trace",
            "format_version": FORMAT_VERSION,
            "cacheprobe": __version__,
            "run_id": self.run_id,
            **self.checksums,
            **about,
        }
        manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples become lists
        manifest["manifest_sha256"] = sha256_of_manifest(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        self._write_whole(MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    def _write_whole(self, name: str, fill: Callable[[Path], object]) -> None:
        temporary = self.staging / name
        fill(temporary)
        fsync(temporary)
        os.replace(temporary, self.directory / name)
        fsync(self.directory)


SHARD_BYTES = 10**9
SITES = ("sites", "heads", "layers")
"""Entries of a manifest, and attributes of a store, that say whose states are there."""
TABLES = {
    "rows": "row_table",
    "hypotheses": "recorded_readings",
    "events": "event_table",
    "ledger": "ledger_table",
    "thoughts": "thought_table",
    "tokens": "token_table",
    "features": "feature_table",
}


def save_trace(trace: TraceData, directory: Path, *, run_id: str | None = None, overwrite: bool = False) -> Path:
    """Writes a trace into `directory`, creating the directory if needed, and returns `directory`.

    run_id: last part of file names; random by default, so that an earlier run in the directory stays complete until the
    end. With a given id the names are reproducible; use one only for a directory without a run.
    overwrite: also write if `directory` contains a run, which the new one replaces; its report is deleted.
    Raises: TraceError, before anything is written, if `require_free` forbids the directory; TraceError if the disk is
    full, after which an earlier run is unchanged.
    """
    with recording(directory, run_id or secrets.token_hex(4), overwrite=overwrite, is_kept=False) as place:
        readings = [[one.recorded_readings] for one in (trace, trace.head) if one is not None]
        place.finish(lambda: write_trace(trace, RunFiles.of(place), readings))
    return directory


def write_trace(
    trace: TraceData,
    files: RunFiles,
    readings: "Sequence[Iterable[pd.DataFrame | None]]",
    *,
    keeps_shards: bool = False,
) -> None:
    """Writes the files of a trace and of its head, if it has one; the manifest last.

    readings: of the trace and of its head: pieces of the table of lens readings, one of which is in memory at a time;
    None or no piece for a run without.  keeps_shards: its files of states belong to this very run, and keep their
    names.
    """
    about = _write_data(trace, files, readings[0], keeps_shards)
    if trace.head is not None:
        about["head"] = _write_data(trace.head, files.of_head(), readings[1], keeps_shards)
    requests = [
        {
            **request_record(r),
            "committed_token_ids": list(trace.tokens[r.request_id]),
            "text": trace.texts[r.request_id],
        }
        for r in trace.requests
    ]
    files.write_manifest({**about, "requests": requests})


def _write_data(
    trace: TraceData, files: RunFiles, readings: "Iterable[pd.DataFrame | None]", keeps_shards: bool
) -> JsonDict:
    """Writes the states and tables of a trace. Returns what the manifest says of them."""
    _write_states(trace.store, files, keeps_shards)
    for name, attribute in TABLES.items():
        pieces = iter(readings if name == "hypotheses" else [getattr(trace, attribute)])
        if (first := next(pieces, None)) is not None:
            files.write_table(files.name(name), chain([first], pieces), name)
    if trace.thought_states is not None:
        states = {"states": trace.thought_states.contiguous()}
        files.write_tensors(files.name("thoughts", "safetensors"), states)
    sites = {name: list(getattr(trace.store, name)) for name in SITES}
    return {**sites, "modules": trace.store.modules, "meta": trace.meta}


def _write_states(store: StateStore, files: RunFiles, keeps_shards: bool) -> None:
    """Writes the captured states as safetensors files.

    States that were read from the same directory, or `keeps_shards`, are compared with their checksums, and their files
    get new names, or keep them. Those that have their names there already are not compared.
    """
    names = (files.name("states", "safetensors", number) for number in count())
    is_here = isinstance(store, ShardStore) and store.files.directory.resolve() == files.directory.resolve()
    if isinstance(store, ShardStore) and (is_here or keeps_shards):
        for shard, name in zip(store.shards, store.shards if keeps_shards else names, strict=False):
            if is_here and keeps_shards:
                files.sizes[name], files.blocks[name] = store.files.sizes[name], store.files.blocks[name]
            else:
                files.write(name, lambda path, shard=shard: store.files.copy(shard, path))
        return
    batch: dict[str, Tensor] = {}
    for place in store.places:
        batch[tensor_key(*place)] = store.stored(*place).contiguous()
        if sum(tensor.nbytes for tensor in batch.values()) >= SHARD_BYTES:
            files.write_tensors(next(names), batch)
            batch = {}
    if batch:
        files.write_tensors(next(names), batch)


_STORED_AS_THEY_ARE = ("request_id", "is_deterministic", "arrival_step", "sample_of", "is_chat")
_SEQUENCES = ("prompt_token_ids", "turns", "forced_token_ids")


def request_record(request: Request) -> JsonDict:
    """Returns a request as a JSON object, without what it generated."""
    example = request.example
    return {
        **{name: getattr(request, name) for name in _STORED_AS_THEY_ARE},
        **{name: list(getattr(request, name)) for name in _SEQUENCES},
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "sampling": asdict(request.sampling) if request.sampling else None,
        "example": example_record(example) if example is not None else None,
    }


def request_from_record(item: JsonDict) -> Request:
    """Builds a Request from its JSON object in the manifest."""
    return Request(
        **{name: item[name] for name in _STORED_AS_THEY_ARE},
        prompt=item["prompt"] if isinstance(item["prompt"], str) else tuple(item["prompt"]),
        prompt_token_ids=tuple(item["prompt_token_ids"]),
        turns=tuple(map(tuple, item["turns"])),
        forced_token_ids=tuple(item["forced_token_ids"]),
        sampling=SamplingParams(**item["sampling"]) if item["sampling"] else None,
        example=example_from_record(item["example"]) if item["example"] else None,
    )
