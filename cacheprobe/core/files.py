"""Writes files so that they appear complete or not at all."""

import hashlib
import json
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
        fsync(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path, content: object, *, indent: int | None = 1, sort_keys: bool = False) -> Path:
    """Writes a JSON file that appears whole or not at all. Numbers keep all their digits."""
    text = json.dumps(content, indent=indent, sort_keys=sort_keys) + "\n"
    return write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def sha256_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
