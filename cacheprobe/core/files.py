"""Writes files so that they appear complete or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, fill: Callable[[Path], object]) -> Path:
    """Calls `fill` on a temporary file beside `path`, then renames it to `path`; after an error `path` is unchanged.

    The folder is created if it is absent. The temporary file has the ending of `path`, for writers that choose by
    ending.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=f".tmp{path.suffix}")
    os.close(handle)
    beside = Path(name)
    try:
        fill(beside)
        beside.chmod(0o666 & ~_umask())  # mkstemp's file is its owner's alone
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return path


def fsync(path: Path) -> None:
    """Returns once a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
