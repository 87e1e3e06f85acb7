"""Reads manifest.json of a saved run and its files, and compares every part with its checksum before it is used. Does
not import torch.

A save writes the manifest last, so a run without one is incomplete. The manifest holds a checksum of each block of
BLOCK_BYTES of each file. A read takes whole blocks, so no library sees a damaged byte: a header, a footer and a page
header of Parquet, which page checksums leave out, are in blocks like the rest. The checksum is XXH3 of 128 bits, as for
weights (`models.weights`): 27 GB/s on a core that computes SHA-256 at 2.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from cacheprobe.core.values import JsonDict

FORMAT_VERSION = 15
"""Number of the format of saved runs, and of the journals of growing ones. Only this format is read."""
_EARLIER = "commit 29bbc91e"
"""Reads the formats whose manifests do not name the cacheprobe that wrote them."""
MANIFEST, JOURNAL = "manifest.json", "journal.jsonl"
NOTES, NOTES_LOCK = "notes.json", ".notes.lock"
HEAD = "head_"
"""First part of the names of the files of a draft head's rows, states and readings."""
BLOCK_BYTES, BLOCK_HEX = 2**20, 32
"""Bytes of a file that have one checksum in the manifest, and its number of hexadecimal digits."""
UNREAD = (
    'Z of this run was left for later (lens="later") and is not read yet; '
    "cp.load_trace(dir, model=cp.load_model(...)) reads it when it is first needed"
)
"""Text that says why a saved run without its model has no lens readings."""
UNFINISHED = "unfinished"
"""Entry of `trace.meta["finish"]` for a request that has not ended."""


class TraceError(ValueError):
    """Raised if a saved run cannot be read, or if a run may not be saved in a directory."""


class ChangedManifestError(TraceError):
    """Says that a manifest differs from its checksum."""


def read_manifest(directory: Path) -> JsonDict:
    """Returns the manifest of a saved run as a dict.

    Raises: TraceError if the path is no directory or has no manifest, or if the manifest is not readable, belongs to
    another program, has another format, or was changed after the run was saved.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise TraceError(f"{directory} is not a directory; give the directory that a run was saved in")
    if not path.exists():
        if runs := runs_in(directory):
            raise TraceError(
                f"{directory} holds runs: {_listed(runs)}; give one of them, such as {directory / runs[0]}"
            )
        if (directory / JOURNAL).exists():
            raise TraceError(
                f"{directory} holds a run that is not finished: cp.load_trace reads it, and `cacheprobe resume "
                f"{directory}` continues it if no process does"
            )
        raise TraceError(f"{directory} has no {MANIFEST}: the run was not saved to its end; run it again")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not readable as JSON ({error}); run it again") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != "cacheprobe trace":
        raise TraceError(f"{path} is not a cacheprobe trace")
    require_format(directory, manifest)
    if manifest.get("manifest_sha256") != sha256_of_manifest(manifest):
        raise ChangedManifestError(
            f"{path} was changed after the run was saved: its checksum differs; run it again or restore the file"
        )
    return manifest


def require_format(directory: Path, header: JsonDict) -> None:
    """Checks the format of a run. header: its manifest, or the first line of its journal. Raises: TraceError, with the
    version of cacheprobe that reads it, for another one."""
    version = header.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        reader = header.get("cacheprobe", _EARLIER)
        raise TraceError(
            f"{directory} is of trace format {version}, this cacheprobe reads {FORMAT_VERSION}; read it with "
            f"cacheprobe {reader}, or run it again"
        )


def of_head(entries: JsonDict) -> JsonDict | None:
    """Returns what a manifest, or a line of a journal, says of the drafter's head, in the same form; None if the run
    has none. Entries that the head shares with the run, such as requests, are the run's."""
    own = entries.get("head")
    return None if own is None else {**entries, **own, "head": None, "prefix": HEAD}


def runs_in(folder: Path) -> list[str]:
    """Returns the names of the saved runs inside a folder, sorted, as relative paths.

    If the folder contains none, returns the runs one level deeper, such as shards/x of a sweep; [] if there are none.
    """
    for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        if names := sorted(path.parent.relative_to(folder).as_posix() for path in folder.glob(pattern)):
            return names
    return []


def _listed(names: list[str], most: int = 8) -> str:
    """Returns the first `most` names as text, separated by commas, and the number of further names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def sha256_of_manifest(manifest: JsonDict) -> str:
    """Returns the SHA-256 digest, as hex text, of a manifest without its own field "manifest_sha256"."""
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checksums_of(path: Path) -> tuple[int, str]:
    """Returns (size in bytes, checksums of the blocks as one hex text) of a file."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        blocks = [xxhash.xxh3_128_hexdigest(file.read(BLOCK_BYTES)) for _ in range(0, size, BLOCK_BYTES)]
    return size, "".join(blocks)


class CheckedFiles:
    """Reads parts of the files of one saved run. A part that differs from its checksum raises a TraceError."""

    def __init__(self, directory: Path, manifest: JsonDict) -> None:
        self.directory = directory
        self.sizes: dict[str, int] = manifest["files"]
        self.blocks: dict[str, str] = manifest["blocks"]
        self.prefix: str = manifest.get("prefix", "")
        """First part of the names of those files that `names` lists."""

    def require_whole(self) -> None:
        """Checks that every file exists and has the recorded size. Raises: TraceError for the first that does not."""
        for name in self.sizes:
            if fault := self._size_fault(name):
                raise TraceError(f"{self.directory} is incomplete: {fault}; run it again or restore the file")

    def _size_fault(self, name: str) -> str | None:
        """Returns a sentence if a file is missing or has another size; else None."""
        try:
            size = (self.directory / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        return None if size == self.sizes[name] else f"{name} has {size} bytes instead of {self.sizes[name]}"

    def names(self, kind: str, ending: str = "parquet") -> list[str]:
        """Returns the names of the files of one kind, such as "rows", in the order in which they were written."""
        first = f"{self.prefix}{kind}-"
        return [name for name in self.sizes if name.startswith(first) and name.endswith(f".{ending}")]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns bytes start..stop-1 of a file (default: to its end) as a writable array [stop - start] of uint8.

        Raises: TraceError if the file is gone, shorter than recorded, or differs from its checksum in a block that
        holds one of these bytes.
        """
        size = self.sizes[name]
        stop = size if stop is None else stop
        first = start // BLOCK_BYTES
        begin, end = first * BLOCK_BYTES, min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, size)
        with self.naming(name):
            data = np.fromfile(self.directory / name, np.uint8, count=max(end - begin, 0), offset=begin)
        if len(data) < end - begin:
            raise TraceError(
                f"{self.directory / name} ends after {begin + len(data)} bytes instead of {size}; run it again or "
                "restore the file"
            )
        if place := self._damage(name, data, first):
            raise TraceError(
                f"{self.directory / name} was changed after the run was saved, or is of another run: {place} differ "
                "from their checksum; run it again or restore the file"
            )
        return data[start - begin : stop - begin]

    def _damage(self, name: str, data: np.ndarray, first: int) -> str | None:
        """Compares each block of `data` with its checksum. Returns the place in the file of the first block that
        differs, as text such as "bytes 0 to 99"; None if no block differs. first: number of the first block in
        `data`."""
        sums = self.blocks[name]
        for at in range(0, len(data), BLOCK_BYTES):
            block, number = data[at : at + BLOCK_BYTES], first + at // BLOCK_BYTES
            if xxhash.xxh3_128_hexdigest(block.data) != sums[number * BLOCK_HEX : (number + 1) * BLOCK_HEX]:
                return f"bytes {number * BLOCK_BYTES} to {number * BLOCK_BYTES + len(block) - 1}"
        return None

    def fault(self, name: str) -> str | None:
        """Compares a whole file with its size and its checksums. Returns a sentence with the place of the first
        difference; None if there is none."""
        if fault := self._size_fault(name):
            return fault
        with (self.directory / name).open("rb") as file:
            for number in range(-(-self.sizes[name] // BLOCK_BYTES)):
                block = np.frombuffer(file.read(BLOCK_BYTES), np.uint8)
                if place := self._damage(name, block, number):
                    return f"{name} was changed after the run was saved: {place} differ"
        return None

    def copy(self, name: str, path: Path) -> None:
        """Makes `path` a second name of a file's bytes, after comparing them with their checksums; copies the bytes if
        the file system has no hard links. Raises: TraceError for a damaged file."""
        if fault := self.fault(name):
            raise TraceError(f"{self.directory}: {fault}; run it again or restore the file")
        try:
            os.link(self.directory / name, path)
        except OSError:
            shutil.copyfile(self.directory / name, path)

    def parquet(self, name: str) -> pq.ParquetFile:
        """Opens a table as a ParquetFile, whose reads are compared with the checksums. Raises: TraceError for a
        damaged file."""
        with self.naming(name):
            return pq.ParquetFile(pa.PythonFile(_Readable(self, name), mode="r"), pre_buffer=True)

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Returns a table of the run. columns: to read; None for all. Raises: TraceError as `read`."""
        with self.naming(name):
            return pq.read_table(pa.BufferReader(pa.py_buffer(self.read(name))), columns=columns)

    def lines(self, name: str, key: str, values: Sequence[int]) -> pa.Table:
        """Returns the lines of a table whose column `key` holds one of `values`. Reads only those parts of the file
        that can hold one."""
        wanted = np.unique(np.asarray(values, dtype=np.int64))
        parquet = self.parquet(name)
        column = parquet.schema_arrow.get_field_index(key)
        found = []
        with self.naming(name):
            for number in range(parquet.num_row_groups):
                statistics = parquet.metadata.row_group(number).column(column).statistics
                if statistics is None or not statistics.has_min_max:  # of no line
                    continue
                low, high = np.searchsorted(wanted, [statistics.min, statistics.max + 1])
                if low == high:
                    continue
                is_wanted = pc.is_in(parquet.read_row_group(number, [key])[key], value_set=pa.array(wanted))
                if pc.any(is_wanted).as_py():
                    found.append(parquet.read_row_group(number).filter(is_wanted))
            return pa.concat_tables(found or [parquet.schema_arrow.empty_table()])

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Turns an error of a library inside the `with`, which reads the file `name`, into a TraceError with its
        path."""
        path = self.directory / name
        try:
            yield
        except TraceError:
            raise
        except FileNotFoundError as error:
            raise TraceError(
                f"{path} is gone since the run was opened: another run was saved in its place, or it was deleted; open "
                "the run again"
            ) from error
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise TraceError(f"{path} cannot be read ({error!s:.200}); run it again or restore the file") from error


class _Readable(io.RawIOBase):
    """Reads a file of a saved run as a binary file object, for pyarrow."""

    def __init__(self, files: CheckedFiles, name: str) -> None:
        self._files, self._name, self._at = files, name, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position of the next byte to read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Sets the position of the next byte to read, and returns it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._files.sizes[self._name]}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Returns the next `size` bytes, fewer at the end of the file. Raises: TraceError as `CheckedFiles.read`."""
        end = self._files.sizes[self._name]
        stop = end if size < 0 else min(self._at + size, end)
        data = self._files.read(self._name, self._at, stop).tobytes() if stop > self._at else b""
        self._at += len(data)
        return data


def damaged_files(directory: Path) -> tuple[int, list[str]]:
    """Compares the files of a saved run with their sizes and checksums.

    Returns (number of files compared, manifest.json included; a list with one sentence for each file that differs or is
    missing). Raises: TraceError for an unreadable manifest.
    """
    try:
        files = CheckedFiles(directory, read_manifest(directory))
    except ChangedManifestError:  # its checksums prove nothing
        return 1, [f"{MANIFEST} was changed after the run was saved: its checksum differs"]
    return len(files.sizes) + 1, [fault for name in files.sizes if (fault := files.fault(name))]
