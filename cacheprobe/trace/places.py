"""Checks whether a run may be saved in a directory, before anything is computed or written. Does not import torch."""

import json
from itertools import chain, count
from pathlib import Path

from cacheprobe.trace.manifest import MANIFEST, TraceError

KINDS = ("states", "rows", "hypotheses", "events", "ledger", "thoughts", "tokens")
"""First part of the names of a run's data files."""


def require_free(directory: Path, overwrite: bool = False) -> None:
    """Checks that a run may be saved in this directory: that there is no such directory, or an empty one. Files named
    like those of a run, such as an unfinished save leaves, are allowed.

    overwrite: the directory may also contain a complete run, which the new one replaces.
    Raises: TraceError if the path is a file; if the directory contains a run (unless `overwrite`) or a manifest.json of
    another program; or if it has no manifest.json but other files than those of a run.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise TraceError(f"{directory} is a file; choose a directory to save the run in")
    if (directory / MANIFEST).exists():
        description = _run_description(directory)
        if not overwrite:
            raise TraceError(
                f"{directory} already holds a run ({description}); choose another directory, or replace the run with "
                "--overwrite (in Python: save(..., overwrite=True))"
            )
        return
    other_files = [path.name for path in directory.iterdir() if not is_of_a_run(path.name)]
    if other_files:
        raise TraceError(
            f"{directory} holds files that are not a trace, such as {other_files[0]}; choose an empty directory"
        )


def free_beside(directory: Path) -> Path:
    """Returns the first path that has no manifest.json (so no complete run) among `directory`, NAME-stopped,
    NAME-stopped-2, ... in the same folder."""
    numbers = (f"-{n}" for n in count(2))
    alternatives = (directory.with_name(f"{directory.name}-stopped{number}") for number in chain([""], numbers))
    return next(path for path in chain([directory], alternatives) if not (path / MANIFEST).exists())


def is_of_a_run(name: str) -> bool:
    """Returns True if a file name is that of a saved run's file, of its report, or of a temporary file of a save."""
    stem = name.removesuffix(".tmp")
    is_data = stem.endswith((".parquet", ".safetensors")) and stem.startswith(tuple(f"{kind}-" for kind in KINDS))
    return is_data or stem in (MANIFEST, "report.html")


def _run_description(directory: Path) -> str:
    """Returns text for an error message: the model and the number of requests of the run in this directory. Raises:
    TraceError if manifest.json belongs to another program."""
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
