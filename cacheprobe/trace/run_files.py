"""Writes the files of one run: each is whole on the disk before it has its name, and its checksums are kept."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from cacheprobe.core.files import fsync
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.checked_files import checksums_of
from cacheprobe.trace.manifest import FORMAT_VERSION, MANIFEST, sha256_of_manifest
from cacheprobe.trace.tables.schema import arrow_table

if TYPE_CHECKING:
    from torch import Tensor

ROW_GROUP = 2**14
"""Lines of a Parquet row group. Reading one request of a long run then reads little more than its own lines."""


def parquet_options(schema: pa.Schema) -> JsonDict:
    """Returns the options with which a table of this schema is written as Parquet.

    Dictionaries make floats larger, because few repeat; their bytes are split by place and compressed instead. Numbers
    and types stay, so every reader of Parquet reads the same bits.
    """
    paths = {}
    for column in schema:
        is_list = pa.types.is_list(column.type)
        paths[f"{column.name}.list.element" if is_list else column.name] = (
            column.type.value_type if is_list else column.type
        )
    floats = [path for path, kind in paths.items() if pa.types.is_floating(kind)]
    return {
        "compression": "zstd",
        "use_dictionary": [path for path in paths if path not in floats],
        "use_byte_stream_split": floats or False,
    }


def write_parquet(table: pd.DataFrame, path: "Path | BytesIO", name: str) -> None:
    """Writes a table of a run as one Parquet file. path: or an open file.  name: of the table in `schema.TABLES`."""
    arrow = arrow_table(table, name)
    pq.write_table(arrow, path, row_group_size=ROW_GROUP, **parquet_options(arrow.schema))


class RunFiles:
    """Writes files of one run into a directory, and holds their sizes and checksums by name.

    staging: an empty folder on the same file system, for files that are not whole yet.
    """

    def __init__(self, directory: Path, staging: Path, run_id: str) -> None:
        self.directory, self.staging, self.run_id = directory, staging, run_id
        self.sizes: dict[str, int] = {}
        self.blocks: dict[str, str] = {}

    @property
    def checksums(self) -> JsonDict:
        """Sizes of the written files, and checksums of their blocks, as in a manifest."""
        return {"files": self.sizes, "blocks": self.blocks}

    def clear(self) -> None:
        """Forgets the sizes and checksums of the files written so far."""
        self.sizes, self.blocks = {}, {}

    def write(self, name: str, fill: Callable[[Path], object]) -> str:
        """Calls `fill` on a path of its own, flushes that file to the disk, gives it its name, and returns the name."""
        self._write_whole(name, fill)
        self.sizes[name], self.blocks[name] = checksums_of(self.directory / name)
        return name

    def write_tensors(self, name: str, tensors: "Mapping[str, Tensor]") -> str:
        """Writes tensors as one safetensors file, and returns its name."""
        from safetensors.torch import save_file

        return self.write(name, lambda path: save_file(dict(tensors), path))

    def write_manifest(
        self, shards: Sequence[str], sites: dict[str, Sequence[object]], requests: Sequence[JsonDict], meta: JsonDict
    ) -> None:
        """Writes manifest.json, which makes these files the run of the directory.

        shards: names of the files of states, in their order.  sites: the lists `sites`, `heads` and `layers` of the
        store.  requests: as from `storage.request_record`, with the committed tokens and the text.
        """
        manifest = {
            "format": "cacheprobe trace",
            "format_version": FORMAT_VERSION,
            "run_id": self.run_id,
            **self.checksums,
            "shards": list(shards),
            **sites,
            "requests": list(requests),
            "meta": meta,
        }
        manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples become lists
        manifest["manifest_sha256"] = sha256_of_manifest(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        self._write_whole(MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    def _write_whole(self, name: str, fill: Callable[[Path], object]) -> None:
        temporary = self.staging / name
        fill(temporary)
        fsync(temporary)
        os.replace(temporary, self.directory / name)
        fsync(self.directory)
