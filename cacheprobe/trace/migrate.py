"""Migrates the manifest and tables of an older trace format to the newest, one version at a time. Does not import
torch.

Each version, and what it added or renamed:

    1   tokens, rows, readings, events, ledger, states at S, T and C
    2   arrivals, samples and preemptions; log-probabilities of committed tokens; thoughts
    3   states of attention heads
    4   SHA-256 of every file, and of the manifest
    5   the texts of all tokens that the run names; status given_up, of drafts without a verdict; ␣ in texts
    6   the setting max_kv_tokens, named kv_rows before
    7   the status superseded, named candidate before; the path "fast", named "twin" before
    8   a checksum of each block of 1 MiB of every file
    9   states of one site and layer in several files, in the order of `shards`
    10  states rounded to int8; the capture settings statuses, every and keep
    11  no SHA-256 of files: their blocks have checksums

Reading changes no file on the disk; `cacheprobe migrate` rewrites a run in the newest format.
`meta["missing"]` lists the data that an older version did not record, so asking for the data raises an error instead of
returning an empty table.
"""

from collections.abc import Callable, Mapping

import pandas as pd

from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.tables.token_history import token_history

Manifest = JsonDict

_NO_LOGPROBS = "trace format 1 did not record them; run it again"


def _from_1(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 1 as format 2, with default values for the fields that format 1 lacks."""
    requests = [{"arrival_step": 0, "sample_of": None, **request} for request in old["requests"]]
    meta = {"preemptions": [], "errors": {}, **old["meta"]}
    meta["missing"] = {"log-probabilities": _NO_LOGPROBS, **meta.get("missing", {})}
    return {**old, "format_version": 2, "requests": requests, "meta": meta}


def _from_2(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 2 as format 3, with default values for fields that it may lack."""
    later = {"errors": {}, "thought_layer": None, "thinking": None, "cache_row_bytes": None}
    capture = {"heads": [], **old["meta"]["capture"]}
    return {**old, "format_version": 3, "heads": [], "meta": {**later, **old["meta"], "capture": capture}}


def _from_3(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 3 as format 4, with empty checksums and self-checks."""
    meta = {"self_checks": {"compared": 0, "differences": []}, **old["meta"]}
    return {**old, "format_version": 4, "meta": meta, "sha256": {}, "manifest_sha256": None}


def _from_4(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 4 as format 5, which differs only in the version number."""
    return {**old, "format_version": 5}


def _from_5(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 5 as format 6: the setting kv_rows is renamed to max_kv_tokens."""
    config = {"max_kv_tokens" if name == "kv_rows" else name: value for name, value in old["meta"]["config"].items()}
    return {**old, "format_version": 6, "meta": {**old["meta"], "config": config}}


def _from_6(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 6 as format 7: the path "twin" is renamed to "fast"."""
    meta = dict(old["meta"])
    if meta["fingerprint"].get("path") == "twin":
        meta["fingerprint"] = {**meta["fingerprint"], "path": "fast"}
        meta["path_reason"] = "fast" + meta["path_reason"].removeprefix("twin")
    return {**old, "format_version": 7, "meta": meta}


def _from_7(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 7 as format 8, with no checksums of blocks."""
    return {**old, "format_version": 8, "blocks": {}}


def _from_8(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 8 as format 9, which differs only in the version number."""
    return {**old, "format_version": 9}


def _from_9(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 9 as format 10, which differs only in the version number."""
    return {**old, "format_version": 10}


def _from_10(old: Manifest) -> Manifest:
    """Returns a manifest of trace format 10 as format 11, without checksums of files if their blocks have them."""
    if old["stored_version"] >= FIRST_WITH_BLOCKS:
        old = {name: value for name, value in old.items() if name != "sha256"}
    return {**old, "format_version": 11}


_STEPS: dict[int, Callable[[Manifest], Manifest]] = {
    1: _from_1,
    2: _from_2,
    3: _from_3,
    4: _from_4,
    5: _from_5,
    6: _from_6,
    7: _from_7,
    8: _from_8,
    9: _from_9,
    10: _from_10,
}

OLDEST, NEWEST = min(_STEPS), max(_STEPS) + 1
"""Trace formats that can be read. `Trace.save` writes NEWEST."""
FIRST_WITH_CHECKSUMS, FIRST_WITH_BLOCKS = 4, 8
"""First trace formats with a checksum of each file, and of each block of a file."""


def migrated(manifest: Manifest) -> Manifest:
    """Returns the manifest of a saved run in the newest trace format; its field `stored_version` is the version on the
    disk.

    The version must be one of OLDEST to NEWEST.
    """
    manifest = {**manifest, "stored_version": manifest["format_version"]}
    while manifest["format_version"] < NEWEST:
        manifest = _STEPS[manifest["format_version"]](manifest)
    return manifest


def migrated_events(table: pd.DataFrame) -> pd.DataFrame:
    """Returns a stored table. If it is an events table without the column committed_logprobs_nats (trace format 1),
    adds the column, with an empty list in each cell."""
    if "committed_token_ids" not in table.columns or "committed_logprobs_nats" in table.columns:
        return table
    return table.assign(committed_logprobs_nats=[[] for _ in range(len(table))])


def migrated_rows(rows: pd.DataFrame, events: pd.DataFrame, prompt_lengths: Mapping[int, int]) -> pd.DataFrame:
    """Returns the rows table of a run stored before trace format 5, as trace format 5 would have stored it.

    White space in token texts becomes signs such as ␣, and some rows get the status `given_up`: a draft token without a
    verdict. Before format 5, these rows had the status `rolled_back`. A decode row was given up if the newest draft
    token at its position had no verdict. Rows of verify passes always had a verdict, because rows of failed passes were
    not stored.
    """
    history = token_history(events)
    position = history.place + history.request_id.map(prompt_lengths)
    drafts = history[history.outcome.fillna("") != "committed"].assign(position=position)
    rolled_back = rows[(rows.status == "rolled_back") & (rows.phase == "decode")]
    with_drafts = rolled_back[["row", "request_id", "position", "step"]].merge(drafts, on=["request_id", "position"])
    newest = with_drafts[with_drafts.born < with_drafts.step].sort_values("born").drop_duplicates("row", keep="last")
    given_up = newest[(newest.outcome.isna() | (newest.outcome == "given_up").fillna(False)).to_numpy(dtype=bool)].row
    is_given_up = rows.row.isin(given_up)
    changed = {name: rows[name].mask(is_given_up, "given_up") for name in ("role", "status")}
    return rows.assign(token=rows.token.map(visible), **changed)


def renamed_status(table: pd.DataFrame, stored_version: int) -> pd.DataFrame:
    """Returns a table of rows, readings or thoughts in which the status `candidate` is renamed to `superseded`.

    The status had its old name before trace format 7; a newer table is returned unchanged.
    """
    if stored_version >= 7:
        return table
    return table.assign(status=table.status.replace("candidate", "superseded"))


def migrated_readings(readings: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the lens readings or thoughts of a run before trace format 5, with the role and status of their migrated
    rows.

    rows: as from `migrated_rows`. White space in token texts becomes signs such as ␣, as in newer runs.
    """
    row_info = rows.set_index("row").loc[readings.row]
    text_columns = [name for name in ("token", "committed_token") if name in readings.columns]
    tokens = {name: readings[name].map(visible, na_action="ignore") for name in text_columns}
    return readings.assign(role=row_info.role.to_numpy(), status=row_info.status.to_numpy(), **tokens)
