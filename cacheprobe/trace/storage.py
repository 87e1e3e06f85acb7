"""Saves and loads runs in the only on-disk format: safetensors shards, Parquet tables, and a manifest written last.

    run/
      manifest.json                  written last: names the files of the run, with sizes and checksums
      states-<id>-00000.safetensors  one tensor [n, m] for each (site, layer), shards of about 1 GB; of attention heads
                                     [n, h, d], and of patterns one flat tensor (see StateStore.heads). int8: 4 numbers
                                     more in each vector, the bytes of its scale (see state_codec.py)
      rows-<id>.parquet, hypotheses-<id>.parquet, events-<id>.parquet, ledger-<id>.parquet, tokens-<id>.parquet
      features-<id>.parquet          if features of a dictionary were recorded
      thoughts-<id>.parquet and .safetensors  of a Thinking States model

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
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cacheprobe import __version__
from cacheprobe.core.files import fsync
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks import example_from_record, example_record
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.manifest import FORMAT_VERSION, JOURNAL, MANIFEST, checksums_of, sha256_of_manifest
from cacheprobe.trace.parts.growing import GrowingRun
from cacheprobe.trace.parts.shards import ShardStore, read_tensors
from cacheprobe.trace.places import saving
from cacheprobe.trace.state_store import tensor_key
from cacheprobe.trace.stored import StoredRun
from cacheprobe.trace.tables.schema import arrow_schema, arrow_table

if TYPE_CHECKING:
    from torch import Tensor


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


def write_parquet(table: "pd.DataFrame | pa.Table", path: "Path | BytesIO", name: str) -> None:
    """Writes a table of a run as one Parquet file. path: or an open file.  name: of the table in `schema.TABLES`."""
    arrow = table if isinstance(table, pa.Table) else arrow_table(table, name)
    pq.write_table(arrow, path, row_group_size=ROW_GROUP, **parquet_options(arrow.schema))


def write_pieces(path: Path, pieces: Iterable[pd.DataFrame], name: str) -> None:
    """Writes pieces of a table, one after the other, as one Parquet file. name: of the table in `schema.TABLES`."""
    schema = arrow_schema(name)
    with pq.ParquetWriter(path, schema, **parquet_options(schema)) as writer:
        for piece in pieces:
            writer.write_table(arrow_table(piece, name), row_group_size=ROW_GROUP)


class RunFiles:
    """Writes files of one run into a directory, and holds their sizes and checksums by name.

    staging: an empty folder on the same file system, for files that are not whole yet.
    """

    def __init__(self, directory: Path, staging: Path, run_id: str) -> None:
        self.directory, self.staging, self.run_id = directory, staging, run_id
        self.sizes: dict[str, int] = {}
        self.blocks: dict[str, str] = {}

    @property
    def checksums(self) -> JsonDict:
        """Sizes of the written files, and checksums of their blocks, as in a manifest."""
        return {"files": self.sizes, "blocks": self.blocks}

    def clear(self) -> None:
        """Forgets the sizes and checksums of the files written so far."""
        self.sizes, self.blocks = {}, {}

    def write(self, name: str, fill: Callable[[Path], object]) -> str:
        """Calls `fill` on a path of its own, flushes that file to the disk, gives it its name, and returns the name."""
        self._write_whole(name, fill)
        self.sizes[name], self.blocks[name] = checksums_of(self.directory / name)
        return name

    def write_table(self, name: str, table: "pd.DataFrame | pa.Table", schema: str) -> str:
        """Writes a table as one Parquet file, and returns its name. schema: of `tables.schema.TABLES`."""
        return self.write(name, lambda path: write_parquet(table, path, schema))

    def write_tensors(self, name: str, tensors: "Mapping[str, Tensor]") -> str:
        """Writes tensors as one safetensors file, and returns its name."""
        from safetensors.torch import save_file

        return self.write(name, lambda path: save_file(dict(tensors), path))

    def write_manifest(
        self, shards: Sequence[str], sites: dict[str, Sequence[object]], requests: Sequence[JsonDict], meta: JsonDict
    ) -> None:
        """Writes manifest.json, which makes these files the run of the directory.

        shards: names of the files of states, in their order.  sites: the lists `sites`, `heads` and `layers` of the
        store.  requests: as from `storage.request_record`, with the committed tokens and the text.
        """
        manifest = {
            "format": "cacheprobe trace",
            "format_version": FORMAT_VERSION,
            "cacheprobe": __version__,
            "run_id": self.run_id,
            **self.checksums,
            "shards": list(shards),
            **sites,
            "requests": list(requests),
            "meta": meta,
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
    run_id = run_id or secrets.token_hex(4)
    with saving(directory, run_id, overwrite=overwrite) as staging:
        _write_run(trace, directory, staging, run_id)
    return directory


def _write_run(trace: TraceData, directory: Path, staging: Path, run_id: str) -> None:
    """Writes the files of a run into `directory`, the manifest last. staging: a folder for files that are not whole."""
    files = RunFiles(directory, staging, run_id)
    shards = _write_states(trace, files)
    _ = trace.token_texts  # makes the tokens table of a trace without one
    for name, attribute in TABLES.items():
        table = getattr(trace, attribute)
        if table is not None:
            files.write_table(f"{name}-{run_id}.parquet", table, name)
    if trace.thought_states is not None:
        files.write_tensors(f"thoughts-{run_id}.safetensors", {"states": trace.thought_states.contiguous()})
    requests = [
        {
            **request_record(r),
            "committed_token_ids": list(trace.tokens[r.request_id]),
            "text": trace.texts[r.request_id],
        }
        for r in trace.requests
    ]
    store = trace.store
    sites = {"sites": list(store.sites), "heads": list(store.heads), "layers": list(store.layers)}
    files.write_manifest(shards, sites, requests, trace.meta)


def finish_run(run: GrowingRun, files: RunFiles, meta: JsonDict) -> list[str]:
    """Writes one table of each kind and the manifest of a run that was recorded in parts, which makes the directory a
    finished run. Returns the names of the files that the finished run no longer needs, the journal last.

    files: of the same directory and run.  meta: of the whole run. One part of the readings is in memory at a time.
    """
    run_id = files.run_id
    written = {"rows": run.rows, "events": run.events, "ledger": run.ledger, "tokens": run.token_table}
    for name, table in {**written, "thoughts": run.thoughts, "features": run.feature_table}.items():
        if table is not None:
            files.write_table(f"{name}-{run_id}.parquet", table, name)
    if (states := thought_states(run)) is not None:
        files.write_tensors(f"thoughts-{run_id}.safetensors", {"states": states})
    pieces = run.reading_pieces()
    if (first := next(pieces, None)) is not None:
        whole = chain([first], pieces)
        files.write(f"hypotheses-{run_id}.parquet", lambda path: write_pieces(path, whole, "hypotheses"))
    for of_files, kept in files.checksums.items():
        kept |= {name: run.journal.checksums[of_files][name] for name in run.shards}
    sites = {name: run.journal.header[name] for name in ("sites", "heads", "layers")}
    files.write_manifest(run.shards, sites, run.requests, meta)
    return [*(name for name in run.files.sizes if name not in files.sizes), JOURNAL]


def thought_states(run: StoredRun) -> Tensor | None:
    """Returns the chunk states [n, c, m] of n thoughts; None for a run without thoughts."""
    parts = [read_tensors(run.files, name, ["states"])["states"] for name in run.thought_files]
    return torch.cat(parts) if parts else None


def trace_fields(run: StoredRun, model: CachedLM | None) -> dict[str, Any]:
    """Returns the fields of the Trace of a run, finished or not, as a dict by name. Reads the tables now; states and
    lens readings are read at their first use. Raises: TraceError for a damaged file."""
    return dict(
        requests=tuple(request_from_record(item) for item in run.requests),
        tokens={item["request_id"]: item["committed_token_ids"] for item in run.requests},
        texts={item["request_id"]: item["text"] for item in run.requests},
        store=ShardStore(run.files, run.shards, run.sites, run.layers, run.heads),
        meta=run.meta,
        model=model,
        thought_states=thought_states(run),
        row_table=run.rows,
        event_table=run.events,
        token_table=run.token_table,
        ledger_table=run.ledger,
        thought_table=run.thoughts,
        feature_table=run.feature_table,
        stored_readings=None,
        readings_on_disk=run.all_readings,
        table_files=run.table_files,
    )


def _write_states(trace: TraceData, files: RunFiles) -> list[str]:
    """Writes the captured states as safetensors files; returns a list of the file names.

    States that were read from the same directory are compared with their checksums, and their files get new names.
    """
    name_of = f"states-{files.run_id}-{{:05d}}.safetensors".format
    store = trace.store
    if isinstance(store, ShardStore) and store.files.directory.resolve() == files.directory.resolve():
        copied = store.files
        return [
            files.write(name_of(number), lambda path, shard=shard: copied.copy(shard, path))
            for number, shard in enumerate(store.shards)
        ]
    shards: list[str] = []
    batch: dict[str, Tensor] = {}
    batch_bytes = 0

    def flush() -> None:
        """Writes the collected tensors as one safetensors file, if there are any."""
        nonlocal batch, batch_bytes
        if batch:
            shards.append(files.write_tensors(name_of(len(shards)), batch))
            batch, batch_bytes = {}, 0

    for site in (*trace.store.sites, *trace.store.heads):
        for layer in trace.store.layers:
            tensor = trace.store.stored(site, layer).contiguous()
            batch[tensor_key(site, layer)] = tensor
            batch_bytes += tensor.numel() * tensor.element_size()
            if batch_bytes >= SHARD_BYTES:
                flush()
    flush()
    return shards


def request_record(request: Request) -> JsonDict:
    """Returns a request as a JSON object, without what it generated."""
    example = request.example
    return {
        "request_id": request.request_id,
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "prompt_token_ids": list(request.prompt_token_ids),
        "sampling": asdict(request.sampling) if request.sampling else None,
        "is_deterministic": request.is_deterministic,
        "arrival_step": request.arrival_step,
        "sample_of": request.sample_of,
        **({"is_chat": True} if request.is_chat else {}),
        **({"turns": request.turns} if request.turns else {}),
        **({"forced_token_ids": list(request.forced_token_ids)} if request.forced_token_ids else {}),
        "example": example_record(example) if example is not None else None,
    }


def request_from_record(item: JsonDict) -> Request:
    """Builds a Request from its JSON object in the manifest."""
    prompt = item["prompt"] if isinstance(item["prompt"], str) else tuple(item["prompt"])
    sampling = item["sampling"]
    return Request(
        prompt=prompt,
        sampling=SamplingParams(**sampling) if sampling else None,
        is_deterministic=item["is_deterministic"],
        request_id=item["request_id"],
        arrival_step=item["arrival_step"],
        sample_of=item["sample_of"],
        prompt_token_ids=tuple(item["prompt_token_ids"]),
        is_chat=bool(item.get("is_chat", False)),
        turns=tuple(map(tuple, item.get("turns", ()))),
        forced_token_ids=tuple(item.get("forced_token_ids", ())),
        example=example_from_record(item["example"]) if item["example"] else None,
    )
