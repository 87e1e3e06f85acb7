"""Reads and checks manifest.json of a saved run. A save writes the manifest last, so a run without one is incomplete.

Does not import torch.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from cacheprobe.core.values import JsonDict
from cacheprobe.trace.migrate import FIRST_WITH_BLOCKS, FIRST_WITH_CHECKSUMS, NEWEST, OLDEST, migrated

FORMAT_VERSION = NEWEST
MANIFEST, JOURNAL = "manifest.json", "journal.jsonl"
BLOCK_BYTES, BLOCK_HEX = 2**20, 32
"""Bytes of a file that have one checksum in the manifest, and its number of hexadecimal digits."""
_TYPES = {str: "a text", int: "a whole number", bool: "true or false", dict: "an object", list: "a list"}
_REQUEST = {"request_id": int, "prompt_token_ids": [int], "committed_token_ids": [int], "text": str} | {
    "prompt": (str, list), "sampling": (dict, None), "is_deterministic": bool, "example": (dict, None)
}  # fmt: skip
_STORED = {"run_id": str, "files": {str: int}, "shards": [str], "sites": [str], "layers": [int]} | {
    "requests": [_REQUEST],
    "meta": {"kind": str, "fingerprint": {"model": str}, "config": dict, "capture": dict, "finish": dict},
}
"""What a manifest of every trace format holds. A dict gives required keys, or with the key `str` the type of every
value; a list the type of every item; a tuple the allowed types; None is null."""
_MIGRATED = {
    "heads": [str], "blocks": {str: str},
    "requests": [{"arrival_step": int, "sample_of": (int, None)}],
    "meta": {"errors": dict, "preemptions": list, "capture": {"heads": list}},
}  # fmt: skip
"""What a manifest holds besides, once it is migrated to the newest trace format."""
UNREAD = (
    'Z of this run was left for later (lens="later") and is not read yet; '
    "cp.load_trace(dir, model=cp.load_model(...)) reads it when it is first needed"
)
"""Text that says why a saved run without its model has no lens readings."""
UNFINISHED = "unfinished"
"""Entry of `trace.meta["finish"]` for a request that has not ended."""


class TraceError(ValueError):
    """Raised if a saved run cannot be read, or if a run may not be saved in a directory."""


def read_manifest(directory: Path) -> JsonDict:
    """Returns the manifest of a saved run as a dict, migrated to the newest trace format.

    Raises: TraceError if the path is no directory or has no manifest, or if the manifest is not readable, belongs to
    another program, was changed after the run was saved, lacks a key, or has a format version that this code does not
    know.
    """
    manifest, fault = stored_manifest(directory)
    if fault is not None:
        raise TraceError(f"{directory / fault}; run it again or restore the file")
    return manifest


def stored_manifest(directory: Path) -> tuple[JsonDict, str | None]:
    """Returns (the manifest as from `read_manifest`, a sentence that says that it differs from its checksum; None if
    it does not, or has none). Raises: TraceError for every other fault."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise TraceError(f"{directory} is not a directory; give the directory that a run was saved in")
    if not path.exists():
        if runs := runs_in(directory):
            raise TraceError(
                f"{directory} holds runs: {_listed(runs)}; give one of them, such as {directory / runs[0]}"
            )
        if (directory / JOURNAL).exists():
            raise TraceError(
                f"{directory} holds a run that is not finished: cp.load_trace reads it, and `cacheprobe resume "
                f"{directory}` continues it if no process does"
            )
        raise TraceError(f"{directory} has no {MANIFEST}: the run was not saved to its end; run it again")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not readable as JSON ({error}); run it again") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != "cacheprobe trace":
        raise TraceError(f"{path} is not a cacheprobe trace")
    version = manifest.get("format_version")
    if type(version) is not int or not OLDEST <= version <= NEWEST:
        remedy = "a newer cacheprobe wrote it: update" if type(version) is int and version > NEWEST else "run it again"
        raise TraceError(
            f"{directory} is of trace format {version}, this cacheprobe reads {OLDEST} to {NEWEST}; {remedy}"
        )
    fault, recorded = None, manifest.get("manifest_sha256")
    if version >= FIRST_WITH_CHECKSUMS and not isinstance(recorded, str):
        raise TraceError(f"{path} lacks manifest_sha256; run it again or restore the file")
    if recorded is not None and recorded != sha256_of_manifest(manifest):
        fault = f"{MANIFEST} was changed after the run was saved: its checksum differs"
    if fault is None:  # else a changed name would be reported as a missing key
        _require_shape(manifest, _STORED, path)
    try:
        newest = migrated(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} cannot be migrated from trace format {version}: {error!r}; run it again") from error
    if fault is None:
        _require_shape(newest, _MIGRATED, path)
        if FIRST_WITH_CHECKSUMS <= version < FIRST_WITH_BLOCKS:
            _require_shape(newest, {"sha256": {str: str}}, path)
        _require_files(newest, path)
    return newest, fault


def _require_shape(value: object, wanted: object, path: Path, where: str = "") -> None:
    """Checks the keys and types of a part of a manifest, which is at `where`. wanted: as `_STORED`.

    Raises: TraceError that names the first key that is missing or has another type.
    """
    if isinstance(wanted, tuple):
        if not any(value is None if one is None else isinstance(value, one) for one in wanted):
            _refuse(path, where, " or ".join(_TYPES.get(one, "null") for one in wanted))
    elif isinstance(wanted, type):
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            _refuse(path, where, _TYPES[wanted])
    elif isinstance(wanted, list):
        if not isinstance(value, list):
            _refuse(path, where, _TYPES[list])
        for number, item in enumerate(value):
            _require_shape(item, wanted[0], path, f"{where}[{number}]")
    elif isinstance(wanted, Mapping):
        if not isinstance(value, dict):
            _refuse(path, where, _TYPES[dict])
        for key in value if str in wanted else wanted:
            at = f"{where}.{key}" if where else str(key)
            if key not in value:
                raise TraceError(f"{path} lacks {at}; run it again or restore the file")
            _require_shape(value[key], wanted[str if str in wanted else key], path, at)


def _refuse(path: Path, where: str, wanted: str) -> NoReturn:
    """Raises a TraceError that says that a part of a manifest is not what is `wanted`."""
    raise TraceError(f"{path}: {where} is not {wanted}; run it again or restore the file")


def _require_files(manifest: JsonDict, path: Path) -> None:
    """Checks that a migrated manifest names the tables of every run and the shards, and no file of another folder; and
    that a run with checksums has one for each file and block. Raises: TraceError for the first that is missing."""
    files, version, run_id = manifest["files"], manifest["stored_version"], manifest["run_id"]
    tables = (f"{name}-{run_id}.parquet" for name in ("rows", "events", "ledger"))
    if lacking := [name for name in (*tables, *manifest["shards"]) if name not in files]:
        raise TraceError(f"{path} lacks files.{lacking[0]}; run it again or restore the file")
    for name, size in files.items():
        if Path(name).name != name:
            raise TraceError(f"{path} names a file of another folder, {name}; restore the manifest")
        if FIRST_WITH_CHECKSUMS <= version < FIRST_WITH_BLOCKS and name not in manifest["sha256"]:
            raise TraceError(f"{path} lacks sha256.{name}; run it again or restore the file")
        if (
            version >= FIRST_WITH_BLOCKS
            and len(manifest["blocks"].get(name, "")) != -(-size // BLOCK_BYTES) * BLOCK_HEX
        ):
            raise TraceError(f"{path} lacks checksums of blocks.{name}; run it again or restore the file")


def runs_in(folder: Path) -> list[str]:
    """Returns the names of the saved runs inside a folder, sorted, as relative paths.

    If the folder contains none, returns the runs one level deeper, such as shards/x of a sweep; [] if there are none.
    """
    for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        if names := sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob(pattern)):
            return names
    return []


def _listed(names: list[str], most: int = 8) -> str:
    """Returns the first `most` names as text, separated by commas, and the number of further names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def require_whole(directory: Path, manifest: JsonDict) -> None:
    """Checks that every file named in the manifest exists and has the recorded size.

    Raises: TraceError for the first file that is missing or has another size.
    """
    for name, size in manifest["files"].items():
        path = directory / name
        if not path.exists():
            raise TraceError(f"{directory} is incomplete: {name} is missing; run it again or restore the file")
        if path.stat().st_size != size:
            raise TraceError(
                f"{path} has {path.stat().st_size} bytes instead of {size}; run it again or restore the file"
            )


def sha256_of_manifest(manifest: JsonDict) -> str:
    """Returns the SHA-256 digest, as hex text, of a manifest without its own field "manifest_sha256"."""
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
