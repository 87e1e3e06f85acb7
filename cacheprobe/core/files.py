"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, fill: Callable[[Path], object]) -> Path:
    """Let `fill` write a file beside `path`, and put it in its place; after a failure `path` is as it was.

    The folder is made where it is absent. The file beside it ends as `path` does, for what goes by endings.
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
    """A file's bytes, or a folder's names, are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
