"""Checks whether a run may be saved in a directory, before anything is computed or written. Loads no torch."""

import json
from itertools import chain, count
from pathlib import Path

from cacheprobe.trace.manifest import MANIFEST, TraceError

KINDS = ("states", "rows", "hypotheses", "events", "ledger", "thoughts", "tokens")
"""First part of the names of a run's data files."""


def require_free(directory: Path, overwrite: bool = False) -> None:
    """Checks that a run may be saved in this directory: it is absent, empty, or left by an unfinished save.

    overwrite: the directory may hold a run too, which the new one replaces.
    Raises: TraceError for a file, for a directory with a run unless `overwrite`, and for one with other files.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise TraceError(f"{directory} is a file; choose a directory to save the run in")
    if (directory / MANIFEST).exists():
        held = _described(directory)
        if not overwrite:
            raise TraceError(
                f"{directory} already holds a run ({held}); choose another directory, or replace the run with "
                "--overwrite (in Python: save(..., overwrite=True))"
            )
        return
    strangers = [path.name for path in directory.iterdir() if not is_of_a_run(path.name)]
    if strangers:
        raise TraceError(
            f"{directory} holds files that are not a trace, such as {strangers[0]}; choose an empty directory"
        )


def free_beside(directory: Path) -> Path:
    """Returns `directory`, or else NAME-stopped, NAME-stopped-2 and so on beside it: the first that holds no run."""
    numbers = (f"-{n}" for n in count(2))
    beside = (directory.with_name(f"{directory.name}-stopped{number}") for number in chain([""], numbers))
    return next(place for place in chain([directory], beside) if not (place / MANIFEST).exists())


def is_of_a_run(name: str) -> bool:
    """Returns whether a file of this name may belong to a saved run, or is the run's report."""
    stem = name.removesuffix(".tmp")
    is_data = stem.endswith((".parquet", ".safetensors")) and stem.startswith(tuple(f"{kind}-" for kind in KINDS))
    return is_data or stem in (MANIFEST, "report.html")


def _described(directory: Path) -> str:
    """Returns the model and number of requests of the run in this directory, or a note that its manifest is unreadable.

    Raises: TraceError if manifest.json is another program's.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"its {MANIFEST} cannot be read"
    if not isinstance(manifest, dict) or manifest.get("format") != "cacheprobe trace":
        raise TraceError(f"{directory / MANIFEST} is not of a cacheprobe trace; choose an empty directory")
    try:
        return f"{manifest['meta']['fingerprint']['model']}, {len(manifest['requests'])} requests"
    except (KeyError, TypeError):
        return "of an unknown model"
