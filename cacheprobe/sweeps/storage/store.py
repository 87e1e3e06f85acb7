"""Where shards are committed: a folder, or anything that fsspec reaches.

    sweep/
      sweep.json              the newest plan: its cells, settings and code version
      shards/<digest>/        one cell: a saved run; committed once its manifest.json is there
      index/                  what tables of cells are read from; made anew from the manifests where it is missing
      events/<id>.jsonl       what happened, by start of the sweep
      lease/                  of an object store: who writes there now

In a folder a shard is written beside its place, flushed to the disk, and the directory is renamed into its place. An
object store has no such rename: the files are put one by one and the manifest last, and a shard without one does not
count. In both, a shard is there whole or not at all, and committing one twice writes the same bytes.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cacheprobe.core.files import fsync
from cacheprobe.sweeps.storage.clients import opened, put_new
from cacheprobe.trace.manifest import MANIFEST

SHARDS, STAGING = "shards", ".staging"
PLAN = "sweep.json"


class SweepStore:
    """The shards and records of one sweep, at a path or fsspec address."""

    def __init__(self, url: "str | Path") -> None:
        self.url = str(url)
        self.fs, self.root, self.is_local = opened(self.url)

    def __repr__(self) -> str:
        return f"SweepStore({self.url!r})"

    def path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    # -- small files

    def write(self, name: str, data: bytes) -> None:
        """Put a whole file: renamed into its place in a folder, one put in an object store."""
        if self.is_local:
            from cacheprobe.core.files import write_whole

            write_whole(Path(self.path(name)), lambda path: _write_through(path, data))
        else:
            self.fs.pipe_file(self.path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Put a file on the condition that there is none of its name, in one step where the store's client can do that.
        False where there is one. Of object stores alone."""
        try:
            put_new(self.fs, self.path(name), data)
        except FileExistsError:
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None where there is none."""
        try:
            return self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None

    def read_json(self, name: str) -> Any:
        data = self.read(name)
        return None if data is None else json.loads(data)

    # -- shards

    def committed(self) -> frozenset[str]:
        """Digests of the shards that are there whole."""
        if self.is_local:
            folder = self.path(SHARDS)
            found = (e.name for e in os.scandir(folder) if e.is_dir()) if os.path.isdir(folder) else ()
            return frozenset(name for name in found if os.path.exists(f"{folder}/{name}/{MANIFEST}"))
        self.fs.invalidate_cache()
        try:
            listed = self.fs.find(self.path(SHARDS))
        except FileNotFoundError:
            return frozenset()
        return frozenset(name.split("/")[-2] for name in listed if name.endswith(f"/{MANIFEST}"))

    def manifest(self, digest: str) -> dict[str, Any]:
        """A committed shard's manifest. Raises: ValueError where there is no such shard."""
        held = self.read_json(f"{SHARDS}/{digest}/{MANIFEST}")
        if held is None:
            raise ValueError(f"{self.url} has no shard {digest}; its run was not committed: run the sweep again")
        return held

    def commit(self, digest: str, build: Callable[[Path], Any]) -> int:
        """Let `build` write a shard into an empty directory, and commit it. Returns its bytes."""
        staging = Path(self.path(STAGING)) if self.is_local else Path(tempfile.gettempdir())
        staging.mkdir(parents=True, exist_ok=True)
        made = staging / f"cacheprobe-{digest}-{secrets.token_hex(4)}"
        try:
            build(made)
            size = sum(path.stat().st_size for path in made.iterdir())
            if self.is_local:
                self._rename(made, digest)
            else:
                self._put(made, digest)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return size

    def _rename(self, made: Path, digest: str) -> None:
        target = Path(self.path(SHARDS)) / digest
        target.parent.mkdir(parents=True, exist_ok=True)
        fsync(made)
        try:
            os.rename(made, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if (target / MANIFEST).exists():  # another worker was first: the same bytes
                return
            shutil.rmtree(target)  # copied here by hand, and not whole
            os.rename(made, target)
        fsync(target.parent)

    def _put(self, made: Path, digest: str) -> None:
        names = sorted(path.name for path in made.iterdir() if path.name != MANIFEST)
        for name in (*names, MANIFEST):
            self.fs.pipe_file(self.path(f"{SHARDS}/{digest}/{name}"), (made / name).read_bytes())

    def fetch(self, digest: str) -> Path:
        """A committed shard as a local directory: itself, or a copy that is kept for as long as this process lives."""
        files = (*self.manifest(digest)["files"], MANIFEST)
        return self.local_files([f"{SHARDS}/{digest}/{name}" for name in files])[0].parent

    def local_files(self, names: Sequence[str]) -> list[Path]:
        """These files as local ones: themselves, or copies. A digest names bytes, so no copy grows old."""
        if self.is_local:
            return [Path(self.path(name)) for name in names]
        targets = [Path(_copies().name) / hashlib.sha256(self.url.encode()).hexdigest()[:12] / name for name in names]
        wanted = [(self.path(n), str(t)) for n, t in zip(names, targets, strict=True) if not t.exists()]
        for _, target in wanted:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
        if wanted:
            self.fs.get([path for path, _ in wanted], [target for _, target in wanted])
        return targets

    def clean(self) -> None:
        """Remove what killed workers left half written. Only whoever holds the lock may."""
        if self.is_local:
            shutil.rmtree(self.path(STAGING), ignore_errors=True)


_held: list[Any] = []


def _copies() -> Any:
    if not _held:
        _held.append(tempfile.TemporaryDirectory(prefix="cacheprobe-sweep-"))
    return _held[0]


def _write_through(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
