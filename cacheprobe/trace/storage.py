"""Saves and loads runs in the only on-disk format: safetensors shards, Parquet tables, and a manifest written last.

    run/
      manifest.json                  written last: names the files of the run, with sizes and SHA-256
      states-<id>-00000.safetensors  one tensor [n, m] for each (site, layer), shards of about 1 GB; of attention heads
                                     [n, h, d], and of patterns one flat tensor (see StateStore.heads)
      rows-<id>.parquet, hypotheses-<id>.parquet, events-<id>.parquet, ledger-<id>.parquet, tokens-<id>.parquet
      thoughts-<id>.parquet and .safetensors  of a Thinking States model

Every file is written under a temporary name, flushed to the disk and renamed. File names carry an id. So saving over a
run leaves the old one complete until the new manifest replaces the old. Then files that the manifest does not name are
deleted.
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

from cacheprobe.core.files import fsync, sha256_of_file
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks import example_from_record, example_record
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    read_manifest,
    require_whole,
    sha256_of_manifest,
)
from cacheprobe.trace.migrate import migrated_events, migrated_readings, migrated_rows, renamed_status
from cacheprobe.trace.places import is_of_a_run, require_free
from cacheprobe.trace.state_store import ShardStore, tensor_key

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
    Raises: TraceError, before anything is written, if `require_free` forbids the directory.
    """
    require_free(directory, overwrite)
    directory.mkdir(parents=True, exist_ok=True)
    run_id = run_id or secrets.token_hex(4)
    files: dict[str, int] = {}
    checksums: dict[str, str] = {}

    def write(name: str, fill: Callable[[Path], object]) -> None:
        """Writes one file of the run and records its size and checksum."""
        _write_whole(directory / name, fill)
        files[name] = (directory / name).stat().st_size
        checksums[name] = sha256_of_file(directory / name)

    shards = _write_states(trace, run_id, write)
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
        "sha256": checksums,
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
    _write_whole(directory / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))
    _delete_old_files(directory, set(files))
    return directory


def load_fields(directory: Path, model: CachedLM | None) -> dict[str, Any]:
    """Returns the fields of a saved trace as a dict by name: the keyword arguments of `Trace`. States are read at their
    first use.

    Raises: TraceError, as `load_trace`.
    """
    manifest = read_manifest(directory)
    require_whole(directory, manifest)
    run_id = manifest["run_id"]
    fields: dict[str, pd.DataFrame | None] = {
        attribute: pd.read_parquet(directory / f"{name}-{run_id}.parquet")
        if f"{name}-{run_id}.parquet" in manifest["files"]
        else None
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
        store=ShardStore(directory, manifest["shards"], manifest["sites"], manifest["layers"], manifest["heads"]),
        meta=manifest["meta"],
        model=model,
        thought_states=_thought_states(directory / _THOUGHT_STATES.format(run_id)),
        **fields,
    )


def _thought_states(path: Path) -> Tensor | None:
    """Returns the chunk states [n, c, m] in a safetensors file; None if the file does not exist."""
    if not path.exists():
        return None
    from safetensors.torch import load_file

    return load_file(path)["states"]


def _write_states(trace: TraceData, run_id: str, write: Callable[[str, Callable[[Path], object]], None]) -> list[str]:
    """Writes the captured states as safetensors files through `write(name, fill)`; returns a list of the file names."""
    from safetensors.torch import save_file

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


def _write_whole(path: Path, fill: Callable[[Path], object]) -> None:
    """Calls `fill` on a temporary file next to `path`, flushes the file to the disk, and renames it to `path`."""
    temporary = path.with_name(path.name + ".tmp")
    fill(temporary)
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def _delete_old_files(directory: Path, kept: set[str]) -> None:
    """Deletes the files in this directory that are named like a run's and not in `kept`, except the manifest."""
    for path in directory.iterdir():
        if is_of_a_run(path.name) and path.name not in kept and path.name != MANIFEST:
            path.unlink()


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
