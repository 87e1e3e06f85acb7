"""Saves and loads runs in the only on-disk format: safetensors shards, Parquet tables, and a manifest written last.

    run/
      manifest.json                  written last: names the files of the run, with sizes and checksums
      states-<id>-00000.safetensors  one tensor [n, m] for each (site, layer), shards of about 1 GB; of attention heads
                                     [n, h, d], and of patterns one flat tensor (see StateStore.heads)
      rows-<id>.parquet, hypotheses-<id>.parquet, events-<id>.parquet, ledger-<id>.parquet, tokens-<id>.parquet
      thoughts-<id>.parquet and .safetensors  of a Thinking States model

Every file is written in a temporary folder, flushed to the disk and renamed. File names carry an id. So saving over a
run leaves the old one complete until the new manifest replaces the old. Then the files that the old manifest names are
deleted. Only one process at a time saves in a directory (see places.py).
"""

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from cacheprobe.core.files import fsync
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks import example_from_record, example_record
from cacheprobe.trace.checked_files import CheckedFiles, checksums_of, damaged_files
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    TraceError,
    read_manifest,
    require_whole,
    sha256_of_manifest,
)
from cacheprobe.trace.migrate import migrated_events, migrated_readings, migrated_rows, renamed_status
from cacheprobe.trace.places import saving
from cacheprobe.trace.state_store import ShardStore, header_of, read_tensor, tensor_key

SHARD_BYTES = 10**9
ROW_GROUP = 2**14
"""Lines of a Parquet row group. Reading one request of a long run then reads little more than its own lines."""
_TABLES = {
    "rows": "row_table",
    "hypotheses": "stored_readings",
    "events": "event_table",
    "ledger": "ledger_table",
    "thoughts": "thought_table",
    "tokens": "token_table",
}
_THOUGHT_STATES = "thoughts-{}.safetensors"


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


def migrate_run(directory: Path) -> int:
    """Rewrites a saved run of an older trace format in the newest format, in place, and returns the number of the
    format that it had. A run of the newest format is not changed.

    Can be killed at any moment: the directory then holds the whole run, in the older or the newest format. The bytes of
    states are not written again, and a report of the run stays.
    Raises: TraceError for a damaged run, for a cell of a sweep, whose files the sweep lists, and as `save_trace`.
    """
    read_manifest(directory)
    run_id = secrets.token_hex(4)
    with saving(directory, run_id, overwrite=True, keep_report=True) as staging:
        manifest = read_manifest(directory)
        if manifest["stored_version"] < FORMAT_VERSION:
            if "sweep" in manifest["meta"]:
                raise TraceError(f"{directory} is a cell of a sweep, which lists its files; run the sweep again")
            if faults := damaged_files(directory)[1]:
                raise TraceError(f"{directory}: {faults[0]}; run it again or restore the file")
            _write_run(TraceData(**load_fields(directory, None)), directory, staging, run_id)
    return manifest["stored_version"]


def _write_run(trace: TraceData, directory: Path, staging: Path, run_id: str) -> None:
    """Writes the files of a run into `directory`, the manifest last. staging: a folder for files that are not whole."""
    files: dict[str, int] = {}
    sha256: dict[str, str] = {}
    blocks: dict[str, str] = {}

    def write(name: str, fill: Callable[[Path], object]) -> None:
        """Writes one file of the run and records its size and checksums."""
        _write_whole(directory / name, fill, staging)
        files[name], sha256[name], blocks[name] = checksums_of(directory / name)

    shards = _write_states(trace, directory, run_id, write)
    assert trace.token_texts  # builds the table of tokens if the run has none
    for name, attribute in _TABLES.items():
        table = getattr(trace, attribute)
        if table is not None:
            write(
                f"{name}-{run_id}.parquet",
                lambda path, table=table: table.to_parquet(path, index=False, row_group_size=ROW_GROUP),
            )
    if trace.thought_states is not None:
        from safetensors.torch import save_file

        states = {"states": trace.thought_states.contiguous()}
        write(_THOUGHT_STATES.format(run_id), lambda path: save_file(states, path))
    manifest = {
        "format": "cacheprobe trace",
        "format_version": FORMAT_VERSION,
        "run_id": run_id,
        "files": files,
        "sha256": sha256,
        "blocks": blocks,
        "shards": shards,
        "sites": list(trace.store.sites),
        "heads": list(trace.store.heads),
        "layers": list(trace.store.layers),
        "requests": [_request_to_json(trace, request) for request in trace.requests],
        "meta": trace.meta,
    }
    manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples become lists
    manifest["manifest_sha256"] = sha256_of_manifest(manifest)
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    _write_whole(directory / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"), staging)


def load_fields(directory: Path, model: CachedLM | None) -> dict[str, Any]:
    """Returns the fields of a saved trace as a dict by name: the keyword arguments of `Trace`. States are read at their
    first use.

    Raises: TraceError, as `load_trace`.
    """
    manifest = read_manifest(directory)
    require_whole(directory, manifest)
    files, run_id = CheckedFiles(directory, manifest), manifest["run_id"]
    fields: dict[str, pd.DataFrame | None] = {
        attribute: files.table(file).to_pandas() if (file := f"{name}-{run_id}.parquet") in files.sizes else None
        for name, attribute in _TABLES.items()
    }
    fields["event_table"] = migrated_events(fields["event_table"])
    requests = tuple(_request_from_json(item) for item in manifest["requests"])
    if fields["token_table"] is None:
        lengths = {request.request_id: request.num_prompt_tokens for request in requests}
        fields["row_table"] = migrated_rows(fields["row_table"], fields["event_table"], lengths)
        for name in ("stored_readings", "thought_table"):
            if (table := fields[name]) is not None:
                fields[name] = migrated_readings(table, fields["row_table"])
    for name in ("row_table", "stored_readings", "thought_table"):
        if (table := fields[name]) is not None:
            fields[name] = renamed_status(table, manifest["stored_version"])
    return dict(
        requests=requests,
        tokens={item["request_id"]: item["committed_token_ids"] for item in manifest["requests"]},
        texts={item["request_id"]: item["text"] for item in manifest["requests"]},
        store=ShardStore(files, manifest["shards"], manifest["sites"], manifest["layers"], manifest["heads"]),
        meta=manifest["meta"],
        model=model,
        thought_states=_thought_states(files, _THOUGHT_STATES.format(run_id)),
        **fields,
    )


def _thought_states(files: CheckedFiles, name: str) -> Tensor | None:
    """Returns the chunk states [n, c, m] in a safetensors file; None if the run has no such file."""
    if name not in files.sizes:
        return None
    with files.naming(name):
        return read_tensor(files, name, header_of(files, name)["states"])


def _write_states(
    trace: TraceData, directory: Path, run_id: str, write: Callable[[str, Callable[[Path], object]], None]
) -> list[str]:
    """Writes the captured states as safetensors files through `write(name, fill)`; returns a list of the file names.

    States that were read from `directory` itself are compared with their checksums, and their files get new names.
    """
    from safetensors.torch import save_file

    if isinstance(store := trace.store, ShardStore) and store.files.directory.resolve() == directory.resolve():
        names = {shard: f"states-{run_id}-{number:05d}.safetensors" for number, shard in enumerate(store.shards)}
        for shard, name in names.items():
            write(name, lambda path, shard=shard: store.files.copy(shard, path))
        return list(names.values())
    shards: list[str] = []
    batch: dict[str, Tensor] = {}
    batch_bytes = 0

    def flush() -> None:
        """Writes the collected tensors as one safetensors file, if there are any."""
        nonlocal batch, batch_bytes
        if batch:
            name = f"states-{run_id}-{len(shards):05d}.safetensors"
            write(name, lambda path, tensors=batch: save_file(tensors, path))
            shards.append(name)
            batch, batch_bytes = {}, 0

    for site in (*trace.store.sites, *trace.store.heads):
        for layer in trace.store.layers:
            tensor = trace.store.all_of(site, layer).contiguous()
            batch[tensor_key(site, layer)] = tensor
            batch_bytes += tensor.numel() * tensor.element_size()
            if batch_bytes >= SHARD_BYTES:
                flush()
    flush()
    return shards


def _write_whole(path: Path, fill: Callable[[Path], object], staging: Path) -> None:
    """Calls `fill` on a path in the folder `staging`, flushes that file to the disk, and renames it to `path`."""
    temporary = staging / path.name
    fill(temporary)
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def _request_to_json(trace: TraceData, request: Request) -> JsonDict:
    """Returns a request and its committed tokens as a JSON object, for the manifest."""
    example = request.example
    return {
        "request_id": request.request_id,
        "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
        "prompt_token_ids": list(request.prompt_token_ids),
        "sampling": asdict(request.sampling) if request.sampling else None,
        "is_deterministic": request.is_deterministic,
        "arrival_step": request.arrival_step,
        "sample_of": request.sample_of,
        "example": example_record(example) if example is not None else None,
        "committed_token_ids": list(trace.tokens[request.request_id]),
        "text": trace.texts[request.request_id],
    }


def _request_from_json(item: JsonDict) -> Request:
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
        example=example_from_record(item["example"]) if item["example"] else None,
    )
