"""Keeps one table of all committed shards, so that a sweep of ten thousand shards opens by reading one file.

The table holds only data of the shards' manifests. Missing lines, or the whole table, are rebuilt from the manifests.
"""

import io
import json
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.cells import AXES
from cacheprobe.sweeps.plan import size_of
from cacheprobe.sweeps.storage.store import SHARDS, SweepStore

INDEX = "index/cells.parquet"
AXIS_COLUMNS = tuple("window_rows" if name == "window" else name for name in AXES)
"""Axes as columns; the axis `window` is renamed, because SQL reserves that word."""
_LAYER = pa.struct(
    [
        ("layer", pa.int32()),
        ("status", pa.string()),
        ("rows", pa.int64()),
        ("rank_median", pa.float64()),
        ("logprob_nats_mean", pa.float64()),
        ("agrees_mean", pa.float64()),
        ("entropy_nats_mean", pa.float64()),
    ]
)
_FACTS = {"requests": pa.int64(), "tokens": pa.int64(), "steps": pa.int64(), "drafted": pa.int64(),
          "rolled_back": pa.int64(), "acceptance": pa.float64(), "logprob_nats": pa.float64(), "accuracy": pa.float64(),
          "chance": pa.float64(), "answer_mass": pa.float64(), "forced_accuracy": pa.float64(),
          "changed_rows": pa.int64()}  # fmt: skip
SCHEMA = pa.schema(
    [
        ("digest", pa.string()),
        *((name, pa.int64() if name in ("window_rows", "seed") else pa.string()) for name in AXIS_COLUMNS),
        *_FACTS.items(),
        ("run", pa.string()),
        ("version", pa.string()),
        ("code", pa.string()),
        ("bytes", pa.int64()),
        ("tables", pa.list_(pa.string())),
        ("layers", pa.list_(_LAYER)),
    ]
)
"""Columns of the table: digest; the axes; the columns of `work.facts`; run: the common settings as JSON; version and
code that made the shard; bytes; tables: names of its Parquet files; layers: `measures.by_layer`."""


def refresh(store: SweepStore) -> pa.Table:
    """Returns an Arrow table with one line for each committed shard (saved run). If the stored table lacks or exceeds
    these shards, also tries to store the new one."""
    committed = store.committed()
    stored = _stored(store)
    known = set(stored["digest"].to_pylist())
    if known == committed:
        return stored
    kept = stored.filter(pa.array([digest in committed for digest in stored["digest"].to_pylist()], pa.bool_()))
    table = pa.concat_tables([kept, _lines_of(store, sorted(committed - known))])
    sink = io.BytesIO()
    pq.write_table(table, sink)
    try:
        store.write(INDEX, sink.getvalue())
    except OSError:  # a full disk, or a read-only folder: the index is rebuilt at the next opening
        pass
    return table


def _stored(store: SweepStore) -> pa.Table:
    """Returns the stored Arrow table; an empty table if none is stored, or if the stored one cannot be used."""
    data = store.read(INDEX)
    if data is not None:
        try:
            # read in this thread: an Arrow thread that still uses these bytes when Python ends aborts the process
            table = pq.ParquetFile(io.BytesIO(data), pre_buffer=False).read(use_threads=False)
            if table.schema.equals(SCHEMA):
                return table
        except (pa.ArrowInvalid, OSError):  # OSError: damaged bytes inside a page
            pass
    return SCHEMA.empty_table()


def _lines_of(store: SweepStore, digests: Iterable[str]) -> pa.Table:
    """Returns an Arrow table with one line for each shard in `digests`, from the shards' manifests."""
    if store.is_local:
        manifests = map(store.manifest, digests)
    else:
        paths = [store.path(f"{SHARDS}/{digest}/manifest.json") for digest in digests]
        manifests = map(json.loads, store.fs.cat(paths).values()) if paths else ()
    return pa.Table.from_pylist([_row(manifest) for manifest in manifests], schema=SCHEMA)


def _row(manifest: JsonDict) -> JsonDict:
    """Returns the line of a shard in the table as a dictionary, from the shard's manifest."""
    sweep = manifest["meta"]["sweep"]
    cell = sweep["cell"]
    return {
        "digest": sweep["digest"],
        **dict(zip(AXIS_COLUMNS, (cell["axes"].get(name) for name in AXES), strict=True)),
        **sweep["facts"],
        "run": json.dumps(cell["run"], sort_keys=True),
        "version": cell["origin"]["version"],
        "code": cell["origin"]["code"],
        "bytes": size_of(manifest),
        "tables": [name for name in manifest["files"] if name.endswith(".parquet")],
        "layers": sweep["layers"],
    }
