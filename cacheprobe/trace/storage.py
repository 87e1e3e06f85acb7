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

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks import example_from_record, example_record
from cacheprobe.trace.checked_files import CheckedFiles, damaged_files
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.manifest import (
    FORMAT_VERSION,
    TraceError,
    read_manifest,
    require_whole,
)
from cacheprobe.trace.migrate import migrated_events, migrated_readings, migrated_rows, renamed_status
from cacheprobe.trace.parts.shards import ShardStore, header_of, read_tensor
from cacheprobe.trace.places import saving
from cacheprobe.trace.run_files import RunFiles, write_parquet
from cacheprobe.trace.state_store import tensor_key
from cacheprobe.trace.tables.schema import typed

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
    files = RunFiles(directory, staging, run_id)
    shards = _write_states(trace, files)
    assert trace.token_texts  # builds the table of tokens if the run has none
    for name, attribute in TABLES.items():
        table = getattr(trace, attribute)
        if table is not None:
            files.write(
                f"{name}-{run_id}.parquet",
                lambda path, table=table, name=name: write_parquet(table, path, name),
            )
    if trace.thought_states is not None:
        files.write_tensors(_THOUGHT_STATES.format(run_id), {"states": trace.thought_states.contiguous()})
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


def load_fields(directory: Path, model: CachedLM | None) -> dict[str, Any]:
    """Returns the fields of a saved trace as a dict by name: the keyword arguments of `Trace`. States and lens readings
    are read at their first use.

    Raises: TraceError, as `load_trace`.
    """
    manifest = read_manifest(directory)
    require_whole(directory, manifest)
    files, run_id = CheckedFiles(directory, manifest), manifest["run_id"]
    requests = tuple(request_from_record(item) for item in manifest["requests"])
    lengths = {request.request_id: request.num_prompt_tokens for request in requests}

    def stored(name: str) -> pd.DataFrame | None:
        """Returns a table of the run as it is stored; None if the run has no such table."""
        file = f"{name}-{run_id}.parquet"
        return typed(migrated_events(files.table(file).to_pandas()), name) if file in files.sizes else None

    events, tokens, rows = stored("events"), stored("tokens"), stored("rows")
    if tokens is None:
        rows = migrated_rows(rows, events, lengths)
    rows = renamed_status(rows, manifest["stored_version"])

    of_today = TABLES if manifest["stored_version"] == FORMAT_VERSION else ()
    table_files = {name: file for name in of_today if (file := f"{name}-{run_id}.parquet") in files.sizes}

    def read(name: str) -> pd.DataFrame | None:
        """Returns a table of readings or thoughts in today's format; None if the run has no such table."""
        table = stored(name)
        if table is not None and tokens is None:
            table = migrated_readings(table, rows)
        return None if table is None else renamed_status(table, manifest["stored_version"])

    return dict(
        requests=requests,
        tokens={item["request_id"]: item["committed_token_ids"] for item in manifest["requests"]},
        texts={item["request_id"]: item["text"] for item in manifest["requests"]},
        store=ShardStore(files, manifest["shards"], manifest["sites"], manifest["layers"], manifest["heads"]),
        meta=manifest["meta"],
        model=model,
        thought_states=_thought_states(files, _THOUGHT_STATES.format(run_id)),
        row_table=rows,
        event_table=events,
        token_table=tokens,
        ledger_table=stored("ledger"),
        thought_table=read("thoughts"),
        feature_table=stored("features"),
        stored_readings=None,
        readings_on_disk=lambda: read("hypotheses"),
        table_files=table_files,
    )


def _thought_states(files: CheckedFiles, name: str) -> Tensor | None:
    """Returns the chunk states [n, c, m] in a safetensors file; None if the run has no such file."""
    if name not in files.sizes:
        return None
    with files.naming(name):
        return read_tensor(files, name, header_of(files, name)["states"])


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
