"""Commits shards to a folder, or to any store that fsspec can reach.

    sweep/
      sweep.json              the newest plan: its cells, settings and code version
      shards/<digest>/        one cell: a saved run; committed once its manifest.json is there
      index/                  the table of cells; rebuilt from the manifests if it is missing
      events/<id>.jsonl       the log of each start of the sweep
      lease/                  of an object store: who writes there now

In a folder, a shard is written to a temporary directory, flushed to the disk, and renamed into its place. An object
store has no such rename: the files are put one by one and the manifest last, and a shard without a manifest does not
count. In both, a shard is complete or absent, and committing it twice writes the same bytes.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from cacheprobe.core.files import fsync, write_whole
from cacheprobe.core.values import JsonDict, folder
from cacheprobe.sweeps.storage.clients import opened, put_new
from cacheprobe.trace.manifest import MANIFEST

SHARDS, STAGING = "shards", ".staging"
PLAN = "sweep.json"


class SweepStore:
    """Writes and reads the shards (saved runs) and other files of a sweep, in a folder or at an fsspec address."""

    def __init__(self, url: "str | Path") -> None:
        folder("out", url)  # raises for what is no path
        self.url = str(url)
        self.fs, self.root, self.is_local = opened(self.url)

    def __repr__(self) -> str:
        return f"SweepStore({self.url!r})"

    def path(self, name: str) -> str:
        """Returns the full path of the sweep's file `name`, as the fsspec client needs it."""
        return f"{self.root.rstrip('/')}/{name}"

    # -- small files

    def write(self, name: str, data: bytes) -> None:
        """Writes a file so that no reader sees a part of it: by a rename in a folder, by one put in an object store."""
        if self.is_local:
            write_whole(Path(self.path(name)), lambda path: path.write_bytes(data))
        else:
            self.fs.pipe_file(self.path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Puts a file into an object store and returns True; returns False, and writes nothing, if a file of this name
        exists."""
        try:
            put_new(self.fs, self.path(name), data)
        except FileExistsError:
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """Returns the bytes of the file `name`; None if there is no such file."""
        try:
            return self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None

    def read_json(self, name: str) -> JsonDict | None:
        """Returns the content of the JSON file `name` as a dictionary; None if there is no such file."""
        data = self.read(name)
        return None if data is None else json.loads(data)

    # -- shards

    def committed(self) -> frozenset[str]:
        """Returns a frozenset of the digests of all committed shards (saved runs), which are those with a manifest."""
        if self.is_local:
            folder = self.path(SHARDS)
            shards = (e.name for e in os.scandir(folder) if e.is_dir()) if os.path.isdir(folder) else ()
            return frozenset(name for name in shards if os.path.exists(f"{folder}/{name}/{MANIFEST}"))
        self.fs.invalidate_cache()
        try:
            listed = self.fs.find(self.path(SHARDS))
        except FileNotFoundError:
            return frozenset()
        return frozenset(name.split("/")[-2] for name in listed if name.endswith(f"/{MANIFEST}"))

    def manifest(self, digest: str) -> JsonDict:
        """Returns the manifest of a committed shard (saved run). Raises: ValueError if there is no such shard."""
        content = self.read_json(f"{SHARDS}/{digest}/{MANIFEST}")
        if content is None:
            raise ValueError(f"{self.url} has no shard {digest}; its run was not committed: run the sweep again")
        return content

    def commit(self, digest: str, build: Callable[[Path], object]) -> int:
        """Commits the shard (saved run) that `build(temporary directory)` writes; returns the shard's size in bytes."""
        staging = Path(self.path(STAGING)) if self.is_local else Path(tempfile.gettempdir())
        staging.mkdir(parents=True, exist_ok=True)
        directory = staging / f"cacheprobe-{digest}-{secrets.token_hex(4)}"
        try:
            build(directory)
            size = sum(path.stat().st_size for path in directory.iterdir())
            if self.is_local:
                self._rename(directory, digest)
            else:
                self._put(directory, digest)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return size

    def _rename(self, directory: Path, digest: str) -> None:
        """Moves a finished shard (saved run) into the folder of shards. A complete shard with the same digest stays."""
        target = Path(self.path(SHARDS)) / digest
        target.parent.mkdir(parents=True, exist_ok=True)
        fsync(directory)
        try:
            os.rename(directory, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if (target / MANIFEST).exists():  # another worker was first, and has written the same bytes
                return
            shutil.rmtree(target)  # an incomplete shard, which only a copy by hand leaves
            os.rename(directory, target)
        fsync(target.parent)

    def _put(self, directory: Path, digest: str) -> None:
        """Puts the files of a finished shard (saved run) into the object store, the manifest last."""
        names = sorted(path.name for path in directory.iterdir() if path.name != MANIFEST)
        for name in (*names, MANIFEST):
            self.fs.pipe_file(self.path(f"{SHARDS}/{digest}/{name}"), (directory / name).read_bytes())

    def fetch(self, digest: str) -> Path:
        """Returns the local directory of a committed shard (saved run).

        From an object store, the shard is copied; the copy is deleted when the process ends.
        """
        files = (*self.manifest(digest)["files"], MANIFEST)
        return self.local_files([f"{SHARDS}/{digest}/{name}" for name in files])[0].parent

    def local_files(self, names: Sequence[str]) -> list[Path]:
        """Returns the local paths of files of the sweep. Files of an object store are copied when they are first
        requested.

        Copies stay valid, because shards never change.
        """
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
        """Removes the unfinished shards (saved runs) of killed workers. Only the process with the lock may call
        `clean`. Does nothing for an object store."""
        if self.is_local:
            shutil.rmtree(self.path(STAGING), ignore_errors=True)


@cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """Returns the temporary folder for local copies of shards; the folder is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="cacheprobe-sweep-")
