"""Writes files so that a reader finds either the whole new file or the earlier one."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, fill: Callable[[Path], object]) -> Path:
    """Calls `fill` with a temporary path beside `path`, renames that file to `path`, and returns `path`; after an error
    the earlier file is unchanged.

    Creates the folder if it is absent. The temporary file has the ending of `path`, for writers that choose the format
    by the ending.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=f".tmp{path.suffix}")
    os.close(handle)
    temporary = Path(name)
    try:
        fill(temporary)
        temporary.chmod(0o666 & ~_umask())  # mkstemp's file is its owner's alone
        fsync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path, content: object, *, indent: int | None = 1, sort_keys: bool = False) -> Path:
    """Writes `content` as a JSON file and returns the path; after an error the earlier file is unchanged. Floats keep
    all their digits."""
    text = json.dumps(content, indent=indent, sort_keys=sort_keys) + "\n"
    return write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def sha256_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    # os.umask sets a value and returns the earlier one; there is no call that only reads it
    mask = os.umask(0)
    os.umask(mask)
    return mask
