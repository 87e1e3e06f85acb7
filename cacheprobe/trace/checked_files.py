"""Reads the files of a saved run, and compares every part with its checksum before the part is used. Does not import
torch.

The manifest holds a checksum of each block of BLOCK_BYTES of each file. A read takes whole blocks, so no library sees a
damaged byte: a header, a footer and a page header of Parquet, which page checksums leave out, are in blocks like the
rest. The checksum is XXH3 of 128 bits, as for weights (`models.weights`): 27 GB/s on a core that computes SHA-256 at 2.
"""

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from cacheprobe.core.files import sha256_of_file
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import BLOCK_BYTES, BLOCK_HEX, TraceError, stored_manifest
from cacheprobe.trace.migrate import FIRST_WITH_CHECKSUMS
from cacheprobe.trace.tables.schema import TABLES

_COLUMNS = {
    name: set(TABLES[name]) - {"committed_logprobs_nats"}
    for name in ("rows", "events", "ledger", "hypotheses", "tokens")
}
"""Columns that a table has in every trace format, by the first part of the file name."""


def checksums_of(path: Path) -> tuple[int, str]:
    """Returns (size in bytes, checksums of the blocks as one hex text) of a file."""
    blocks, size = [], 0
    block = memoryview(bytearray(BLOCK_BYTES))  # one for all blocks: it stays in a core's cache
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            while count < BLOCK_BYTES and (more := file.readinto(block[count:])):
                count += more
            blocks.append(xxhash.xxh3_128_hexdigest(block[:count]))
            size += count
    return size, "".join(blocks)


class CheckedFiles:
    """Reads parts of the files of one saved run. A part that differs from its checksum raises a TraceError.

    A run of trace formats 4 to 7 has one checksum for each file, compared before the first part of the file is read;
    older runs have none.
    """

    def __init__(self, directory: Path, manifest: JsonDict) -> None:
        self.directory = directory
        self.sizes: dict[str, int] = manifest["files"]
        self._blocks: dict[str, str] = manifest["blocks"]
        self._sha256: dict[str, str] = manifest.get("sha256", {})
        self._compared: set[str] = set()
        """Files without checksums of blocks that were compared as a whole."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns bytes start..stop-1 of a file (default: to its end) as a writable array [stop - start] of uint8.

        Raises: TraceError if the file is gone, shorter than recorded, or differs from its checksum in a block that
        holds one of these bytes.
        """
        size = self.sizes[name]
        stop = size if stop is None else stop
        if name not in self._blocks:
            self._compare_whole(name)
        first = start // BLOCK_BYTES
        begin, end = first * BLOCK_BYTES, min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, size)
        data = np.empty(max(end - begin, 0), np.uint8)
        with self.naming(name), (self.directory / name).open("rb", buffering=0) as file:
            file.seek(begin)
            filled = 0
            while filled < len(data) and (count := file.readinto(data[filled:].data)):
                filled += count
        if filled < len(data):
            raise TraceError(
                f"{self.directory / name} ends after {begin + filled} bytes instead of {size}; run it again or restore "
                "the file"
            )
        if name in self._blocks and (place := self._damage(name, data, first)):
            raise TraceError(
                f"{self.directory / name} was changed after the run was saved, or is of another run: {place} differ "
                "from their checksum; run it again or restore the file"
            )
        return data[start - begin : stop - begin]

    def _damage(self, name: str, data: np.ndarray, first: int) -> str | None:
        """Returns the first block of `data`, which begins with block number `first`, that differs from its checksum, as
        a text "bytes 0 to 99"; None if all are equal."""
        sums = self._blocks[name]
        for at in range(0, len(data), BLOCK_BYTES):
            block, number = data[at : at + BLOCK_BYTES], first + at // BLOCK_BYTES
            if xxhash.xxh3_128_hexdigest(block.data) != sums[number * BLOCK_HEX : (number + 1) * BLOCK_HEX]:
                return f"bytes {number * BLOCK_BYTES} to {number * BLOCK_BYTES + len(block) - 1}"
        return None

    def _compare_whole(self, name: str) -> None:
        """Compares a file with its SHA-256, once. Raises: TraceError if it differs."""
        if name in self._sha256 and name not in self._compared:
            with self.naming(name):
                is_equal = sha256_of_file(self.directory / name) == self._sha256[name]
            if not is_equal:
                raise TraceError(
                    f"{self.directory / name} was changed after the run was saved, or is of another run: its checksum "
                    "differs; run it again or restore the file"
                )
            self._compared.add(name)

    def fault(self, name: str) -> str | None:
        """Compares a whole file with its size and its checksums. Returns a sentence with the place of the first
        difference; None if there is none."""
        path = self.directory / name
        try:
            if (size := path.stat().st_size) != self.sizes[name]:
                return f"{name} has {size} bytes instead of {self.sizes[name]}"
            if name not in self._blocks:
                if name not in self._sha256 or sha256_of_file(path) == self._sha256[name]:
                    return None
                return f"{name} was changed after the run was saved: its checksum differs"
            with path.open("rb") as file:
                for number in range(-(-size // BLOCK_BYTES)):
                    block = np.frombuffer(file.read(BLOCK_BYTES), np.uint8)
                    if place := self._damage(name, block, number):
                        return f"{name} was changed after the run was saved: {place} differ"
        except FileNotFoundError:
            return f"{name} is missing"
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
        """Opens a table as a ParquetFile, whose reads are compared with the checksums. Raises: TraceError if it is no
        Parquet file or lacks a column."""
        with self.naming(name):
            file = pq.ParquetFile(pa.PythonFile(_Readable(self, name), mode="r"), pre_buffer=True)
            self._require_columns(name, file.schema_arrow.names)
        return file

    def table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Returns a table of the run, or some of its columns. Raises: TraceError as `read` and `parquet`."""
        with self.naming(name):
            source = pa.BufferReader(pa.py_buffer(self.read(name)))
            table = pq.read_table(source, columns=None if columns is None else list(columns))
            if columns is None:
                self._require_columns(name, table.column_names)
        return table

    def _require_columns(self, name: str, columns: Sequence[str]) -> None:
        """Raises: TraceError if a column that every trace format has is not among `columns`."""
        if lacking := _COLUMNS.get(name.split("-")[0], set()).difference(columns):
            raise TraceError(f"{self.directory / name} has no column {min(lacking)}; run it again or restore the file")

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
    missing). A run of trace format 3 or older has no checksums: 0 files are compared, by their sizes alone.
    Raises: TraceError for an unreadable manifest.
    """
    manifest, fault = stored_manifest(directory)
    if fault is not None:  # its checksums prove nothing
        return 1, [fault]
    files = CheckedFiles(directory, manifest)
    faults = [fault for name in files.sizes if (fault := files.fault(name))]
    return len(files.sizes) + 1 if manifest["stored_version"] >= FIRST_WITH_CHECKSUMS else 0, faults
