"""Checks whether a run may be saved in a directory, and lets one process save there. Does not import torch.

While a run is saved, its directory also holds

    .saving        lock file with a note: the process, the id of the new run, and the files of the run that it replaces
    .saving-<id>/  files that are not whole yet, under whatever temporary names a library gives them

A save that was killed leaves both. The next save deletes what the note names: never a file that only looks like one of
a run.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from cacheprobe.core.files import Locked, only_writer, writer_of
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.journal import read_journal
from cacheprobe.trace.manifest import HEAD, JOURNAL, MANIFEST, NOTES, NOTES_LOCK, TraceError

KINDS = ("states", "rows", "hypotheses", "events", "ledger", "thoughts", "tokens", "features", "readings", "waiting")
"""First part of the names of a run's data files."""
REPORT, LOCK = "report.html", ".saving"


def require_free(directory: Path, overwrite: bool = False) -> None:
    """Checks that a run may be saved in this directory: that there is no such directory, or an empty one. Files named
    like those of a run, such as an unfinished save leaves, are allowed.

    overwrite: the directory may also contain a complete run, which the new one replaces.
    Raises: TraceError if the path is a file, may not be written, or is being written by another process; if the
    directory contains a run (unless `overwrite`) or a manifest.json of another program; or if it has no manifest.json
    but other files than those of a run.
    """
    with saying_why(directory):
        _require_writable(directory)
        if not directory.exists():
            return
        if directory.is_dir() and (directory / LOCK).exists():
            with only_writer(directory / LOCK) as lock:
                _clean(directory, lock.left)
        _require_no_run(directory, overwrite)


@dataclass(frozen=True)
class Recording:
    """Holds the directory that one run is written in, and the run's id."""

    directory: Path
    run_id: str
    is_kept: bool
    """Whether an unfinished run stays after an error or a kill, to be continued."""
    note: Callable[[JsonDict], None]
    """Keeps what the next writer of the directory is to clean up if this process is killed."""

    @property
    def staging(self) -> Path:
        """Folder for files that are not whole yet."""
        return self.directory / f"{LOCK}-{self.run_id}"

    @property
    def replaces_a_run(self) -> bool:
        """Whether the directory holds another run, a finished one, which stays until this one is finished."""
        earlier = _manifest_in(self.directory)
        return bool(earlier) and earlier.get("run_id") != self.run_id

    def drop(self) -> None:
        """Deletes the unfinished run of the directory, the journal last; a finished run stays."""
        with saying_why(self.directory):
            for name in _unfinished_in(self.directory):
                (self.directory / name).unlink(missing_ok=True)

    def finish(self, write: Callable[[], object]) -> None:
        """Calls `write`, which writes the files of the run, the manifest last; then deletes the files of the unfinished
        run that it does not name, the journal last, and those of the run that was replaced, with its report."""
        replaced = [*_manifest_in(self.directory)["files"], REPORT] if self.replaces_a_run else []
        with saying_why(self.directory):
            if replaced:
                self.note({"run_id": self.run_id, "replaces": replaced, "is_recorded": self.is_kept})
            write()
            _clean(self.directory, {"run_id": self.run_id, "replaces": replaced + _unfinished_in(self.directory)})


@contextmanager
def recording(directory: Path, run_id: str, *, overwrite: bool = False, is_kept: bool = True) -> Iterator[Recording]:
    """Lets only this process write a run in `directory` during a `with` block, whose `finish` makes the run whole.

    run_id: of a new run, or of the unfinished run of the directory, which is continued.
    overwrite: a finished run of the directory stays until the new run is finished; an unfinished one is deleted now.
    is_kept: what was written stays after an error, and after a kill: `read_journal` reads it. Otherwise it is deleted.
    Raises: TraceError as `require_free`.
    """
    note = {"run_id": run_id, "replaces": [], "is_recorded": is_kept}
    with ExitStack() as stack:
        with saying_why(directory):
            _require_writable(directory)
            if not is_kept and not directory.exists():
                stack.callback(_remove_empty, directory)
            directory.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(only_writer(directory / LOCK))
            _clean(directory, lock.left)
            journal = read_journal(directory) if is_kept else None
            place = Recording(directory, run_id, is_kept, lock.note)
            if journal is None or journal.run_id != run_id:
                _require_no_run(directory, overwrite)
                place.drop()
            lock.note(note)
            shutil.rmtree(place.staging, ignore_errors=True)
            stack.callback(_clean, directory, note)
            place.staging.mkdir()
        yield place


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):  # not empty: it holds a run, or another process has begun to write there
        directory.rmdir()


def recorded_by(directory: Path) -> str:
    """Returns the name of the process that saves or records a run in a directory now; "" if none does."""
    return writer_of(directory / LOCK)


def clean_finished(directory: Path) -> bool:
    """Deletes the journal and the part files of a finished run, whose manifest.json is in the directory: they stay
    there if the process was killed just before it deleted them. Returns whether it was so."""
    journal = read_journal(directory)
    if journal is None or _manifest_in(directory).get("run_id") != journal.run_id:
        return False
    with saying_why(directory), only_writer(directory / LOCK) as lock:
        _clean(directory, lock.left)  # the files of a run that was replaced
        _clean(directory, {"run_id": journal.run_id, "replaces": _unfinished_in(directory)})
    return True


def _unfinished_in(directory: Path) -> list[str]:
    """Returns the names of the files of an unfinished run, with its journal; [] without one. Files of a finished run
    of the directory are left out."""
    try:
        journal = read_journal(directory)
    except TraceError:
        return [JOURNAL]
    if journal is None:
        return []
    kept = _manifest_in(directory).get("files", ())
    return [name for name in (*_files_of(journal.run_id, directory), JOURNAL) if name not in kept]


def _files_of(run_id: str, directory: Path) -> list[str]:
    """Returns the names of the files of a run in a directory."""
    names = [path.name for path in directory.iterdir()]
    return [name for name in names if re.split(r"[-.]", name)[1:2] == [run_id] and is_of_a_run(name)]


@contextmanager
def saying_why(directory: Path, kept: str = "a run that was there is unchanged") -> Iterator[None]:
    """Turns an error of the file system, or of a lock, inside the `with` into a TraceError with the directory and the
    reason. kept: what the message says about the files that are there."""
    from safetensors import SafetensorError

    try:
        yield
    except Locked as holder:
        raise TraceError(
            f"{directory} is being written by {holder}; wait for it, or choose another directory"
        ) from None
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise TraceError(f"the run cannot be saved in {directory}: {reason}; {kept}") from error


def _require_writable(directory: Path) -> None:
    """Raises: TraceError if `directory`, or the nearest folder above it that exists, is a file or is read-only."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise TraceError(f"{nearest} is a file; choose a directory to save the run in")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise TraceError(f"{nearest} is read-only; choose another directory to save the run in")


def _manifest_in(directory: Path) -> JsonDict:
    """Returns the manifest of a complete run in this directory, as it is stored; {} if there is no readable one."""
    manifest = _json_in(directory / MANIFEST)
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else {}


def _json_in(path: Path) -> object:
    """Returns what a file of JSON holds; None if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _clean(directory: Path, note: JsonDict) -> None:
    """Deletes what a save left, whose note is given: its unfinished files; if its manifest is in the directory, the
    files of the run that it replaced, else its own files; but the parts of a recorded run stay, which is continued.
    Never deletes a file that the manifest names."""
    run_id, replaced = note.get("run_id"), note.get("replaces")
    if not isinstance(run_id, str) or not run_id.isalnum() or not isinstance(replaced, list):
        return
    shutil.rmtree(directory / f"{LOCK}-{run_id}", ignore_errors=True)
    current = _manifest_in(directory)
    if current.get("run_id") == run_id:
        left = [name for name in replaced if isinstance(name, str) and Path(name).name == name]
    else:
        left = [] if note.get("is_recorded") else _files_of(run_id, directory)
    for name in left:
        if name not in current.get("files", ()) and name != MANIFEST:
            (directory / name).unlink(missing_ok=True)


def _require_no_run(directory: Path, overwrite: bool) -> None:
    """Raises: TraceError if `directory` contains a run (unless `overwrite`), or files of another program."""
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
    if (directory / JOURNAL).exists() and not overwrite:
        raise TraceError(
            f"{directory} holds a run that was not finished; continue it with `cacheprobe resume {directory}`, "
            "choose another directory, or replace the run with --overwrite (in Python: overwrite=True)"
        )
    other_files = [path.name for path in directory.iterdir() if not is_of_a_run(path.name)]
    if other_files:
        raise TraceError(
            f"{directory} holds files that are not a trace, such as {other_files[0]}; choose an empty directory"
        )


def free_beside(directory: Path) -> Path:
    """Returns the first path that has no manifest.json (so no complete run) among `directory`, NAME-stopped,
    NAME-stopped-2, ... in the same folder."""
    numbers = (f"-{n}" for n in count(2))
    beside = directory.absolute()  # "." has no name
    alternatives = (beside.with_name(f"{beside.name}-stopped{number}") for number in chain([""], numbers))
    return next(path for path in chain([directory], alternatives) if not (path / MANIFEST).exists())


def is_of_a_run(name: str) -> bool:
    """Returns True if a file name looks like that of a saved run's file, of its report or notes, or of what a save that
    was killed leaves."""
    stem = name.removesuffix(".tmp").removeprefix(HEAD)
    is_data = stem.endswith((".parquet", ".safetensors")) and stem.startswith(tuple(f"{kind}-" for kind in KINDS))
    return is_data or name.startswith(LOCK) or stem in (MANIFEST, REPORT, JOURNAL, NOTES, NOTES_LOCK)


def _run_description(directory: Path) -> str:
    """Returns text for an error message: the model and the number of requests of the run in this directory. Raises:
    TraceError if manifest.json belongs to another program."""
    manifest = _json_in(directory / MANIFEST)
    if manifest is None:
        return f"its {MANIFEST} cannot be read"
    if not isinstance(manifest, dict) or manifest.get("format") != "cacheprobe trace":
        raise TraceError(f"{directory / MANIFEST} is not of a cacheprobe trace; choose an empty directory")
    try:
        return f"{manifest['meta']['fingerprint']['model']}, {len(manifest['requests'])} requests"
    except (KeyError, TypeError):
        return "of an unknown model"
