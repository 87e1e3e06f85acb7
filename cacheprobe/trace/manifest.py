"""Reads and checks manifest.json of a saved run. A save writes the manifest last, so a run without one is incomplete.

Does not import torch.
"""

import hashlib
import json
from pathlib import Path

from cacheprobe.core.files import sha256_of_file
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.migrate import NEWEST, OLDEST, migrated

FORMAT_VERSION = NEWEST
MANIFEST = "manifest.json"
UNREAD = (
    'Z of this run was left for later (lens="later") and is not read yet; '
    "cp.load_trace(dir, model=cp.load_model(...)) reads it when it is first needed"
)
"""Text that says why a saved run without its model has no lens readings."""


class TraceError(ValueError):
    """Raised if a saved run cannot be read, or if a run may not be saved in a directory."""


def read_manifest(directory: Path) -> JsonDict:
    """Returns the manifest of a saved run as a dict, migrated to the newest trace format.

    Raises: TraceError if the path is no directory or has no manifest, or if the manifest is not readable, belongs to
    another program, or has a format version that this code does not know.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise TraceError(f"{directory} is not a directory; give the directory that a run was saved in")
    if not path.exists():
        if runs := runs_in(directory):
            raise TraceError(
                f"{directory} holds runs: {_listed(runs)}; give one of them, such as {directory / runs[0]}"
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


def damaged_files(directory: Path) -> tuple[int, list[str]]:
    """Compares the files of a saved run with their SHA-256 checksums.

    Returns (number of files compared, manifest.json included; a list with one sentence for each file that differs). A
    run of trace format 3 or older has no checksums: 0 files are compared.
    Raises: TraceError for an unreadable manifest, and for a file that is missing or has another size.
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
