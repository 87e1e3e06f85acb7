"""Writes files so that a reader finds either the whole new file or the earlier one, and lets only one process at a time
write to a folder; reads YAML files of settings."""

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cacheprobe.core.values import JsonDict


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
        mask = os.umask(0)  # there is no call that only reads it
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp's file is its owner's alone
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


class Locked(RuntimeError):
    """Signals that another process, or another thread of this one, writes to the same folder. Its text names the
    process."""


@dataclass
class WriterLock:
    """Holds the path of a lock file, which this process has locked, and the note that a killed writer left in it."""

    path: Path
    left: JsonDict = field(default_factory=dict)

    def note(self, content: JsonDict) -> None:
        """Writes a note into the lock file, beside the name of this process. A writer that is killed leaves it for the
        next one."""
        own = {"process": os.getpid(), "host": socket.gethostname()}
        self.path.write_text(json.dumps({**content, **own}), encoding="utf-8")


_MOMENT = 0.2
"""Seconds to wait for a lock, in which `writer_of` may be looking at it."""


@contextmanager
def only_writer(path: Path, patience: float = _MOMENT) -> Iterator[WriterLock]:
    """Locks the lock file `path` for the time of a `with` block, and deletes the file at its end.

    The folder must exist. The lock ends with the process, however the process ends.
    patience: seconds to wait for another writer.
    Raises: Locked, which names the other process, if the file is locked.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=patience)
    try:
        lock.acquire()
    except Timeout:
        raise Locked(_holder(path)) from None
    try:
        held = WriterLock(path, _note_in(path))
        held.note(held.left)
        yield held
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def writer_of(path: Path) -> str:
    """Returns the name of the process that has locked the lock file `path`, such as "process 123 on HOST"; "" if none
    has. Changes nothing: the lock of a process that ended is nobody's, and its file stays."""
    import fcntl

    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file gives it back
    except BlockingIOError:
        return _holder(path)
    except OSError:
        return ""
    return ""


def _holder(path: Path) -> str:
    """Returns the name of the process that locked a lock file, such as "process 123 on HOST"."""
    note = _note_in(path)
    return f"process {note['process']} on {note.get('host')}" if "process" in note else "another process"


def _note_in(path: Path) -> JsonDict:
    """Returns the note in a lock file; {} if there is none."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def read_yaml(path: Path, kind: str) -> object:
    """Returns the content of a YAML file of settings, usually a dict. kind: a word for the file in messages, such as
    "sweep".

    Raises: ValueError if the file is absent, is not UTF-8 or valid YAML, or gives a key twice (the yaml package alone
    would silently keep the last of two equal keys).
    """
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """Loads YAML of plain values, without tags that build Python objects, and refuses a key that is given twice."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            """Returns one mapping of the file as a dict. Raises: yaml.constructor.ConstructorError if a key is given
            twice."""
            keys = [self.construct_object(key) for key, _ in node.value]
            if repeated := [key for i, key in enumerate(keys) if key in keys[:i]]:
                raise yaml.constructor.ConstructorError(None, None, f"{repeated[0]} is given twice", node.start_mark)
            return super().construct_mapping(node, deep=True)

    StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, StrictLoader.construct_mapping)
    if not path.is_file():
        raise ValueError(f"there is no {kind} file {path}; give a YAML file of settings")
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not readable as YAML ({reason}); write a line `name: value` for each") from error
