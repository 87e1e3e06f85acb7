"""Commits shards to a folder, or to any store that fsspec can reach.

    sweep/
      sweep.json              the newest plan: its cells, settings and code version
      shards/<digest>/        one cell: a saved run; committed once its manifest.json is there

In a folder, a shard is written to a temporary directory, flushed to the disk, and renamed into its place. An object
store has no such rename: the files are put one by one and the manifest last, and a shard without a manifest does not
count. In both, a shard is complete or absent, and committing it twice writes the same bytes. These files are the only
state of a sweep, so two sweeps that write to the same object store do work twice, and no harm.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cacheprobe.core.files import Locked, fsync, only_writer, write_whole
from cacheprobe.core.values import JsonDict, folder
from cacheprobe.trace.manifest import MANIFEST

SHARDS, STAGING = "shards", ".staging"
PLAN = "sweep.json"

_CLIENTS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
"""Package of fsspec's own client for each protocol. If the package is not installed, obstore is used."""


class SweepBusy(RuntimeError):
    """Raised if another sweep writes to the same folder."""


def opened(url: str) -> tuple[Any, str, bool]:
    """Opens an fsspec address. Returns (client, path of the address in the client, True if it is a local folder).

    Raises: ValueError for an address that no installed client knows.
    """
    import fsspec

    protocol = url.partition("://")[0] if "://" in url else ""
    client = _CLIENTS.get(protocol)
    if client is not None and find_spec(client) is None:
        if find_spec("obstore") is None:
            raise ValueError(f"{url}: neither {client} nor obstore is installed; pip install 'cacheprobe[sweep]'")
        from obstore.fsspec import FsspecStore, register

        if not issubclass(fsspec.registry.get(protocol, object), FsspecStore):
            register(protocol)
    try:
        # a cached client would not notice that the environment now names another server
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be opened: {error}") from error
    return fs, root, "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


class SweepStore:
    """Writes and reads the shards (saved runs) and other files of a sweep, in a folder or at an fsspec address."""

    def __init__(self, url: "str | Path | None") -> None:
        """Opens the store at `url`. Raises: ValueError for what is no path, and as `opened`."""
        folder("out", url)
        self.url = str(url)
        self.fs, self.root, self.is_local = opened(self.url)

    def __repr__(self) -> str:
        return f"SweepStore({self.url!r})"

    def path(self, name: str) -> str:
        """Returns the full path of the sweep's file `name`, as the fsspec client needs it."""
        return f"{self.root.rstrip('/')}/{name}"

    @contextmanager
    def only_sweep(self) -> Iterator[None]:
        """Keeps other sweeps from writing to this folder during a `with` block, and removes unfinished shards before
        and after it. Does nothing for an object store. Raises: SweepBusy if another sweep writes there."""
        if not self.is_local:
            yield
            return
        lock = Path(self.path(".lock"))
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with only_writer(lock):
                shutil.rmtree(self.path(STAGING), ignore_errors=True)
                yield
                shutil.rmtree(self.path(STAGING), ignore_errors=True)
        except Locked as holder:
            raise SweepBusy(
                f"another sweep writes to {self.url} ({holder}); wait for it, or give another folder"
            ) from None

    def write(self, name: str, data: bytes) -> None:
        """Writes a file so that no reader sees a part of it: by a rename in a folder, by one put in an object store."""
        if self.is_local:
            write_whole(Path(self.path(name)), lambda path: path.write_bytes(data))
            return
        with self._short_errors():
            self.fs.pipe_file(self.path(name), data)

    def read_json(self, name: str) -> JsonDict | None:
        """Returns the content of the JSON file `name` as a dictionary; None if there is no such file."""
        try:
            with self._short_errors():
                return json.loads(self.fs.cat_file(self.path(name)))
        except FileNotFoundError:
            return None

    def committed(self) -> frozenset[str]:
        """Returns a frozenset of the digests of all committed shards (saved runs), which are those with a manifest."""
        if self.is_local:
            paths = Path(self.path(SHARDS)).glob(f"*/{MANIFEST}")
            return frozenset(path.parent.name for path in paths)
        try:
            with self._short_errors():
                self.fs.invalidate_cache()
                listed = self.fs.find(self.path(SHARDS))
        except FileNotFoundError:
            return frozenset()
        return frozenset(name.split("/")[-2] for name in listed if name.endswith(f"/{MANIFEST}"))

    def manifests(self, digests: Sequence[str]) -> list[JsonDict]:
        """Returns the manifests of committed shards (saved runs). Raises: ValueError if one of them is not there."""
        paths = [self.path(f"{SHARDS}/{digest}/{MANIFEST}") for digest in digests]
        try:
            if self.is_local:
                return [json.loads(Path(path).read_bytes()) for path in paths]
            with self._short_errors():
                return [json.loads(content) for content in self.fs.cat(paths).values()] if paths else []
        except FileNotFoundError as error:
            raise ValueError(f"{self.url}: {error}; its run was not committed: run the sweep again") from error

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
        with self._short_errors():
            for name in (*names, MANIFEST):
                self.fs.pipe_file(self.path(f"{SHARDS}/{digest}/{name}"), (directory / name).read_bytes())

    def local_files(self, names: Sequence[str]) -> list[Path]:
        """Returns the local paths of files of the sweep. Files of an object store are copied when they are first
        requested; copies stay valid, because shards never change, and are deleted when the process ends."""
        if self.is_local:
            return [Path(self.path(name)) for name in names]
        targets = [Path(_copies().name) / hashlib.sha256(self.url.encode()).hexdigest()[:12] / name for name in names]
        wanted = [(self.path(n), str(t)) for n, t in zip(names, targets, strict=True) if not t.exists()]
        for _, target in wanted:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
        if wanted:
            with self._short_errors():
                self.fs.get([path for path, _ in wanted], [target for _, target in wanted])
        return targets

    @contextmanager
    def _short_errors(self) -> Iterator[None]:
        """Turns an error of an object store's client, except a missing file, into an OSError of one line."""
        try:
            yield
        except FileNotFoundError:
            raise  # whether a file exists is an answer, not a failure
        except Exception as error:
            if self.is_local:
                raise
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise OSError(
                f"{self.url} does not answer as it should; check address and credentials: {first_line}"
            ) from error


@cache
def _copies() -> tempfile.TemporaryDirectory[str]:
    """Returns the temporary folder for local copies of shards; the folder is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="cacheprobe-sweep-")
