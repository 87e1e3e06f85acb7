"""Opens the results of a sweep (`cacheprobe.load_sweep`), as tables for SQL and as Traces."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa

from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.cells import AXES
from cacheprobe.sweeps.store import PLAN, SHARDS, SweepStore
from cacheprobe.trace.manifest import MANIFEST
from cacheprobe.trace.stored import duckdb
from cacheprobe.trace.tables.schema import arrow_schema

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

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
"""Columns of the table: digest; the axes; the columns of `run_cell.facts`; run: the common settings as JSON; version
and code that made the shard; bytes; tables: names of its Parquet files; layers: `measures.by_layer`."""

SHARD_TABLES = ("hypotheses", "rows", "events", "ledger", "thoughts")
_NAMED = re.compile(r"(?:\bfrom|\bjoin|,)\s*\"?(\w+)")
"""Regular expression of words in a query that may be table names. A wrong match only creates an unused view."""
_DTYPES = {"BOOLEAN": "boolean", "VARCHAR": "str"} | {
    f"{sign}{name}": f"{'UInt' if sign else 'Int'}{bits}"
    for name, bits in (("TINYINT", 8), ("SMALLINT", 16), ("INTEGER", 32), ("BIGINT", 64))
    for sign in ("", "U")
}
"""Dtypes of columns by DuckDB's type, with and without nulls."""
_LAYERS = (
    f"select digest, {', '.join(AXIS_COLUMNS)}, unnest(layers, recursive := true) from committed_cells "
    "where len(layers) > 0"
)


class Sweep:
    """Holds the committed cells (runs) of a sweep, as tables and as Traces. Saved runs are read when a query or a Trace
    needs them.

    cells: one line for each cell: digest; its axes (model, dtype, adapter, products, task, drafter, window_rows, lens,
        intervention, seed); requests, tokens, steps, drafted, rolled_back, acceptance, mean logprob_nats of the
        committed tokens, accuracy, chance, answer_mass, forced_accuracy; changed_rows, the committed rows that the
        intervention acted on, null without one; run (the common settings, JSON), version and code that made the shard,
        bytes.
    layers: one line for each cell, layer and status: digest, axes, and the columns of `analysis.measures.by_layer`.
    """

    def __init__(self, store: SweepStore, index: pa.Table, plan: JsonDict, all_versions: bool) -> None:
        self.store, self.plan = store, plan
        planned = frozenset(plan["digests"])
        digests = index["digest"].to_pylist()
        committed = frozenset(digests)
        is_planned = [digest in planned for digest in digests]
        self.num_others = 0 if all_versions else len(digests) - sum(is_planned)
        """Number of shards of other plans or code versions, which the tables leave out."""
        self._index = index if all_versions else index.filter(pa.array(is_planned, pa.bool_()))
        self.pending = tuple(digest for digest in plan["digests"] if digest not in committed)
        """Digests of planned cells that are not committed."""

    def __repr__(self) -> str:
        others = f"; {self.num_others} shards of other plans or versions are left out" if self.num_others else ""
        return f"Sweep({self.store.url!r}: {len(self._index)} cells, {len(self.pending)} pending{others})"

    def __len__(self) -> int:
        return len(self._index)

    @property
    def cells(self) -> pd.DataFrame:
        """DataFrame with one line for each committed cell: digest, axes, measured numbers, settings, versions, size."""
        return self._index.drop_columns(["layers", "tables"]).to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)

    @property
    def layers(self) -> pd.DataFrame:
        """DataFrame with one line for each cell, layer and status of rows: digest, axes, number of rows, and lens
        measures: rank_median, logprob_nats_mean, agrees_mean, entropy_nats_mean."""
        return self.query("select * from layers")

    def query(self, sql: str) -> pd.DataFrame:
        """Runs an SQL query with DuckDB, and returns the result as a DataFrame.

        Tables: cells, layers, and the tables of the shards: hypotheses, rows, events, ledger and thoughts. The first
        column of a shard table is the cell's digest: `... from hypotheses join cells using (digest)`. Files of shards
        are opened only if the query names their table.
        Raises: ValueError for an empty query, without DuckDB, and with DuckDB's message for SQL that DuckDB refuses.
        """
        if not sql.strip():
            raise ValueError('the query is empty; ask, for one, "select * from cells"')
        database = duckdb()
        with database.connect() as connection:
            connection.register("committed_cells", self._index)
            connection.execute("create view cells as select * exclude (layers, tables) from committed_cells")
            connection.execute(f"create view layers as {_LAYERS}")
            try:
                for name in sorted(set(_NAMED.findall(sql.lower())) & set(SHARD_TABLES)):
                    if read := self._shard_table(name):
                        connection.execute(f"create view {name} as {read}")
                    else:
                        schema = pa.schema([("digest", pa.string()), *arrow_schema(name)])
                        connection.register(name, schema.empty_table())
                result = connection.execute(sql)
                kinds = [str(kind) for _, kind, *_ in result.description]
                table = result.df()
                dtypes = {name: _DTYPES[kind] for name, kind in zip(table, kinds, strict=True) if kind in _DTYPES}
                return table.astype(dtypes)
            except database.Error as error:
                raise ValueError(f"the query cannot be answered: {error}") from error

    def trace(self, digest: str) -> "Trace":
        """Returns the Trace of the one cell whose digest begins with `digest`. States are read at their first use.
        Raises: ValueError if no cell or several cells match."""
        from cacheprobe.trace.trace import load_trace

        return load_trace(self.folder(digest))

    def traces(self, where: str = "true") -> "Iterator[tuple[JsonDict, Trace]]":
        """Yields (dictionary of the cell's columns, Trace) for every cell that meets an SQL condition on `cells`.

        where: for one, "seed = 0 and drafter is null".
        """
        for cell in self.query(f"select * from cells where {where}").to_dict("records"):
            yield cell, self.trace(cell["digest"])

    def folder(self, digest: str) -> Path:
        """Returns the local directory of a cell's saved run, for commands that need a directory.

        From an object store, the run is copied; the copy is deleted when the process ends.
        """
        shard = f"{SHARDS}/{self._full_digest(digest)}"
        (manifest,) = self.store.manifests([shard.removeprefix(f"{SHARDS}/")])
        return self.store.local_files([f"{shard}/{name}" for name in (*manifest["files"], MANIFEST)])[0].parent

    def _full_digest(self, digest: str) -> str:
        """Returns the digest of the one cell that begins with `digest`. Raises: ValueError for none or several."""
        matches = [known for known in self._index["digest"].to_pylist() if known.startswith(digest)]
        if len(matches) != 1 or not digest:
            raise ValueError(
                f"{len(matches)} cells of {self.store.url} begin with {digest!r}; see the digests in .cells"
            )
        return matches[0]

    def _shard_table(self, name: str) -> str:
        """Returns SQL that reads the table `name` of every shard with such a table; '' if no shard has one."""
        files = [
            f"{SHARDS}/{digest}/{file}"
            for digest, listed in zip(self._index["digest"].to_pylist(), self._index["tables"].to_pylist(), strict=True)
            for file in listed
            if file.startswith(f"{name}-")
        ]
        if not files:
            return ""
        listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in self.store.local_files(files))
        read = f"read_parquet([{listed}], filename = true, union_by_name = true)"
        return f"select parse_path(filename)[-2] as digest, * exclude (filename) from {read}"


def load_sweep(url: "str | Path", *, all_versions: bool = False) -> Sweep:
    """Returns the results of a sweep as a Sweep. The sweep need not be complete.

    url: folder or fsspec address of the sweep.  all_versions: also include shards that the newest plan does not list,
    from other settings or other versions of the code (column `code`).
    Raises: ValueError if there is no sweep at `url`, or one of another format version.
    """
    store = SweepStore(url)
    plan = store.read_json(PLAN)
    if not isinstance(plan, dict) or plan.get("format") != "cacheprobe sweep":
        raise ValueError(f"{url} holds no sweep (it has no {PLAN}); give the folder that cacheprobe sweep wrote to")
    if plan["format_version"] != 1:
        raise ValueError(f"{url} is of sweep format {plan['format_version']}, this cacheprobe reads 1")
    table = pa.Table.from_pylist(list(map(_row, store.manifests(sorted(store.committed())))), schema=SCHEMA)
    return Sweep(store, table, plan, all_versions)


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
        "bytes": sum(manifest["files"].values()),
        "tables": [name for name in manifest["files"] if name.endswith(".parquet")],
        "layers": sweep["layers"],
    }
