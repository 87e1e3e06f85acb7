"""The manifest of a saved run: its commit point, read and checked without opening anything else. Loads no torch."""

import json
from pathlib import Path
from typing import Any

FORMAT_VERSION = 3
READABLE_VERSIONS = (2, 3)
"""2 knew no attention heads."""
MANIFEST = "manifest.json"


class TraceError(ValueError):
    """A directory that holds no readable trace; the message says why and what to do."""


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a run's manifest says. Raises: TraceError for a directory without one, or of another version."""
    path = directory / MANIFEST
    if not directory.is_dir():
        raise TraceError(f"{directory} is not a directory; give the directory that a run was saved in")
    if not path.exists():
        raise TraceError(f"{directory} has no {MANIFEST}: the run was not saved to its end; run it again")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is not readable as JSON ({error}); run it again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != "cacheprobe trace":
        raise TraceError(f"{path} is not a cacheprobe trace")
    if manifest.get("format_version") not in READABLE_VERSIONS:
        known = " and ".join(map(str, READABLE_VERSIONS))
        raise TraceError(
            f"{directory} is of trace format {manifest.get('format_version')}, this cacheprobe reads {known}; "
            "run it again, or open it with the version that wrote it"
        )
    return manifest


def require_whole(directory: Path, manifest: dict[str, Any]) -> None:
    """Raises: TraceError where a file that the manifest names is missing or cut short."""
    for name, size in manifest["files"].items():
        path = directory / name
        if not path.exists():
            raise TraceError(f"{directory} is incomplete: {name} is missing; run it again or restore the file")
        if path.stat().st_size != size:
            raise TraceError(
                f"{path} has {path.stat().st_size} bytes instead of {size}; run it again or restore the file"
            )
