"""Keeps models that were converted from GGUF files in the user's cache folder, or in $CACHEPROBE_CACHE."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from cacheprobe.core.files import fsync, sha256_of_file, write_json
from cacheprobe.core.live import ModelError

CONTENTS = "contents.json"
"""File with the names and sizes of a finished directory's files, and their source. Its presence marks a finished
directory."""

_HASHES = "sha256.json"
"""File with the SHA-256 of each GGUF file that was read, beside size, inode and times of the file."""


def cache_directory() -> Path:
    """Returns the path of the folder for converted models and compiled code: $CACHEPROBE_CACHE, or else the user's
    cache folder."""
    if named := os.environ.get("CACHEPROBE_CACHE"):
        return Path(named).expanduser()
    from platformdirs import user_cache_path  # not on every machine with a GPU

    return user_cache_path("cacheprobe")


def cache_bytes() -> int:
    """Returns the size in bytes of all files in the cache folder; 0 if there is none."""
    return sum(path.stat().st_size for path in cache_directory().rglob("*") if path.is_file())


def sha256_of_gguf(gguf: Path) -> str:
    """Returns the SHA-256 of a GGUF file, as 64 hexadecimal digits. An existing cache folder keeps it, until size,
    inode or a time of the file is another."""
    kept, key, stat = cache_directory() / _HASHES, str(gguf.resolve()), gguf.stat()
    state = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
    try:
        known = dict(json.loads(kept.read_text()))
    except (OSError, ValueError, TypeError):
        known = {}
    if known.get(key, [])[:-1] == state:
        return known[key][-1]
    sha256 = sha256_of_file(gguf)
    if kept.parent.is_dir():
        with suppress(OSError):
            write_json(kept, {**known, key: [*state, sha256]})
    return sha256


CONVERTER_VERSION = 1
"""Increase it when a conversion would give another result; directories of other versions are then not used."""


def directory_of_gguf(title: str, sha256: str) -> Path:
    """Returns the folder of a converted GGUF file: the complete one of a file with this SHA-256 under any name, or else
    the one that is to be made, whose name begins with `title`."""
    ending = f"{sha256[:12]}-v{CONVERTER_VERSION}"
    made = filter(is_complete, sorted(cache_directory().glob(f"*-{ending}")))
    return next(made, cache_directory() / f"{title}-{ending}")


def is_complete(directory: Path) -> bool:
    """Returns True if `directory` has a contents.json, and each file listed in it has its recorded size."""
    try:
        sizes = json.loads((directory / CONTENTS).read_text())["files"]
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def commit_directory(build: Callable[[Path], None], target: Path, origin: dict | None = None) -> Path:
    """Returns the directory `target`. If `target` is not complete, `build(directory)` first fills a temporary
    directory, which is then renamed to `target`.

    Builders of one target run one after another. If a builder dies, the next one removes its unfinished folder.
    origin: fields to store in the list of contents.
    Raises: OSError, with a remedy, if the cache folder cannot be written; ModelError if the disk becomes full.
    """
    if is_complete(target):
        return target
    require_writable(target.parent)
    with FileLock(target.parent / f"{target.name}.lock"):
        if is_complete(target):
            return target
        for unfinished in (target, *target.parent.glob(f"{target.name}.*.tmp")):  # the lock is ours: nobody builds it
            shutil.rmtree(unfinished, ignore_errors=True)
        building = target.parent / f"{target.name}.{os.getpid()}.tmp"
        building.mkdir()
        try:
            build(building)
            _seal(building, origin or {})
            building.rename(target)
        except BaseException as error:
            shutil.rmtree(building, ignore_errors=True)
            if _is_full_disk(error):
                raise ModelError(
                    f"the disk of {target.parent} became full, and nothing of {target.name} is left; free space there, "
                    "or set CACHEPROBE_CACHE to a larger folder"
                ) from error
            raise
        fsync(target.parent)
    return target


def _is_full_disk(error: BaseException) -> bool:
    """Returns True for an error of a full disk or a used-up quota, also from libraries that give only its text."""
    full = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in full or any(os.strerror(number) in str(error) for number in full)


def require_writable(folder: Path, needed: float = 600e6) -> None:
    """Creates `folder` if needed. Raises: OSError, with a remedy, if the folder cannot be created or written to.

    needed: bytes that the remedy names.
    """
    remedy = f"set CACHEPROBE_CACHE to a folder with {max(1, needed / 1e6):,.0f} MB free"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise OSError(f"cannot make {folder} ({refused.strerror}): {remedy}") from refused
    if not os.access(folder, os.W_OK):
        raise OSError(f"cannot write to {folder}: {remedy}")


def _seal(directory: Path, origin: dict) -> None:
    """Writes the list of contents (`origin`, and the size of each file), and flushes all files to the disk."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    contents = directory / CONTENTS
    contents.write_text(json.dumps({**origin, "files": sizes}, indent=2) + "\n")
    for path in (*files, contents, directory):
        fsync(path)
