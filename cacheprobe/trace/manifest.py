"""Reads and checks the manifest of a saved run. A save writes the manifest last, so a run without one is incomplete.

Loads no torch.
"""

import hashlib
import json
from pathlib import Path

from cacheprobe.core.files import sha256_of_file
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.migrate import NEWEST, OLDEST, migrated

FORMAT_VERSION = NEWEST
MANIFEST = "manifest.json"


class TraceError(ValueError):
    """Raised for a directory without a readable trace; the message says why and what to do."""


def read_manifest(directory: Path) -> JsonDict:
    """Returns a run's manifest, migrated to today's format by `trace.migrate`.

    Raises: TraceError for a directory without a manifest, or with a format version that this code does not know.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise TraceError(f"{directory} is not a directory; give the directory that a run was saved in")
    if not path.exists():
        if inside := runs_in(directory):
            raise TraceError(
                f"{directory} holds runs: {_listed(inside)}; give one of them, such as {directory / inside[0]}"
            )
        raise TraceError(f"{directory} has no {MANIFEST}: the run was not saved to its end; run it again")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is not readable as JSON ({error}); run it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != "cacheprobe trace":
        raise TraceError(f"{path} is not a cacheprobe trace")
    version = manifest.get("format_version")
    if type(version) is not int or not OLDEST <= version <= NEWEST:
        remedy = "a newer cacheprobe wrote it: update" if type(version) is int and version > NEWEST else "run it again"
        raise TraceError(
            f"{directory} is of trace format {version}, this cacheprobe reads {OLDEST} to {NEWEST}; {remedy}"
        )
    return migrated(manifest)


def runs_in(folder: Path) -> list[str]:
    """Returns the sorted names of the runs inside a folder; if there are none, of the runs in its folders (shards/x of
    a sweep).
    """
    for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        if found := sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob(pattern)):
            return found
    return []


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def require_whole(directory: Path, manifest: JsonDict) -> None:
    """Checks that every file of the manifest is there. Raises: TraceError for a file that is missing or cut short."""
    for name, size in manifest["files"].items():
        path = directory / name
        if not path.exists():
            raise TraceError(f"{directory} is incomplete: {name} is missing; run it again or restore the file")
        if path.stat().st_size != size:
            raise TraceError(
                f"{path} has {path.stat().st_size} bytes instead of {size}; run it again or restore the file"
            )


def sha256_of_manifest(manifest: JsonDict) -> str:
    """Returns the SHA-256 of a manifest's content without its own checksum."""
    said = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def damaged_files(directory: Path) -> tuple[int, list[str]]:
    """Returns (number of files compared with their checksums, one sentence for each file that differs).

    A run of trace format 3 or older has no checksums: 0 files are compared.
    Raises: TraceError for an unreadable manifest, and for a file that is missing or cut short.
    """
    manifest = read_manifest(directory)
    require_whole(directory, manifest)
    if not manifest["sha256"]:
        return 0, []
    faults = []
    written = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    if sha256_of_manifest(written) != manifest["manifest_sha256"]:
        faults.append(f"{MANIFEST} was changed after the run was saved: its checksum differs")
    for name, digest in manifest["sha256"].items():
        if sha256_of_file(directory / name) != digest:
            faults.append(f"{name} was changed after the run was saved: its checksum differs")
    return len(manifest["sha256"]) + 1, faults
