"""Opens a sweep's results (`cacheprobe.load_sweep`), as tables for SQL and as runs."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa

from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.index import AXIS_COLUMNS, refresh
from cacheprobe.sweeps.storage.store import PLAN, SHARDS, SweepStore

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

SHARD_TABLES = ("hypotheses", "rows", "events", "ledger", "thoughts")
_NAMED = re.compile(r"(?:\bfrom|\bjoin|,)\s*\"?(\w+)")
"""Finds words of a query that may be table names; a wrong match only creates an unused view."""
_LAYERS = (
    f"select digest, {', '.join(AXIS_COLUMNS)}, unnest(layers, recursive := true) from cells_held where len(layers) > 0"
)
_RENAMED = "replace (if(status = 'candidate', 'superseded', status) as status)"
"""SQL that gives the status `candidate`, its name before trace format 7, today's name."""


class Sweep:
    """Committed cells of a sweep. Tables are read at first use; states are read through the run of a cell.

    cells: one line for each cell: digest; its axes (model, dtype, adapter, products, task, drafter, window_rows, lens,
        intervention, seed); requests, tokens, steps, drafted, rolled_back, acceptance, mean logprob_nats of the
        committed tokens, accuracy, chance, answer_mass, forced_accuracy; run (the common settings, JSON), version and
        code that made the shard, bytes.
    layers: one line for each cell, layer and status: digest, axes, and the columns of `analysis.measures.by_layer`.
    """

    def __init__(self, store: SweepStore, index: pa.Table, plan: JsonDict, all_versions: bool) -> None:
        self.store, self.plan = store, plan
        planned = frozenset(plan["digests"])
        digests = index["digest"].to_pylist()
        there = frozenset(digests)
        is_planned = [digest in planned for digest in digests]
        self.num_others = 0 if all_versions else len(digests) - sum(is_planned)
        """Number of shards of other plans or versions of the code, which are left out here."""
        self._index = index if all_versions else index.filter(pa.array(is_planned, pa.bool_()))
        self.pending = tuple(digest for digest in plan["digests"] if digest not in there)
        """Digests of planned cells that are not committed."""

    def __repr__(self) -> str:
        others = f"; {self.num_others} shards of other plans or versions are left out" if self.num_others else ""
        return f"Sweep({self.store.url!r}: {len(self._index)} cells, {len(self.pending)} pending{others})"

    def __len__(self) -> int:
        return len(self._index)

    @property
    def cells(self) -> pd.DataFrame:
        """One line for each committed cell: digest, axes, facts, settings, versions, bytes."""
        return self._index.drop_columns(["layers", "tables"]).to_pandas()

    @property
    def layers(self) -> pd.DataFrame:
        """One line for each cell, layer and status, with the columns of `analysis.measures.by_layer`."""
        return self.query("select * from layers")

    def query(self, sql: str) -> pd.DataFrame:
        """Returns the result of an SQL query over the tables cells, layers, hypotheses, rows, events, ledger and
        thoughts.

        Lines of shards' tables begin with the cell's digest: `... from hypotheses join cells using (digest)`. Files of
        shards are opened only if the query names their table.
        Raises: ValueError with DuckDB's message for SQL that DuckDB refuses.
        """
        if not sql.strip():
            raise ValueError('the query is empty; ask, for one, "select * from cells"')
        database = duckdb()
        with database.connect() as held:
            held.register("cells_held", self._index)
            held.execute("create view cells as select * exclude (layers, tables) from cells_held")
            held.execute(f"create view layers as select * {_RENAMED} from ({_LAYERS})")
            try:
                for name in sorted(set(_NAMED.findall(sql.lower())) & set(SHARD_TABLES)):
                    if read := self._shard_table(name):
                        held.execute(f"create view {name} as {read}")
                return held.execute(sql).df()
            except database.Error as error:
                raise ValueError(f"the query cannot be answered: {error}") from error

    def trace(self, digest: str) -> "Trace":
        """Returns the run of one cell, as `load_trace`: its states are read at their first use."""
        from cacheprobe.trace.trace import load_trace

        return load_trace(self.folder(digest))

    def traces(self, where: str = "true") -> "Iterator[tuple[JsonDict, Trace]]":
        """Yields (cell, run) for every cell that meets a condition over `cells`, such as "seed = 0 and drafter is
        null".
        """
        for cell in self.query(f"select * from cells where {where}").to_dict("records"):
            yield cell, self.trace(cell["digest"])

    def folder(self, digest: str) -> Path:
        """Returns a cell's run as a local directory, for commands that need one; copied if the sweep is in an object
        store.
        """
        return self.store.fetch(self._full(digest))

    def _full(self, digest: str) -> str:
        found = [known for known in self._index["digest"].to_pylist() if known.startswith(digest)]
        if len(found) != 1 or not digest:
            raise ValueError(f"{len(found)} cells of {self.store.url} begin with {digest!r}; see the digests in .cells")
        return found[0]

    def _shard_table(self, name: str) -> str:
        """Returns SQL that reads one table of every shard that has this table; '' if none has."""
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
        renamed = _RENAMED if name in ("hypotheses", "rows", "thoughts") else ""
        return f"select parse_path(filename)[-2] as digest, * exclude (filename) {renamed} from {read}"


def load_sweep(url: "str | Path", *, all_versions: bool = False) -> Sweep:
    """Returns the results of a sweep, complete or not.

    url: folder or fsspec address of the sweep.  all_versions: include shards outside the newest plan, from other
    settings or other versions of the code (column `code`).
    Raises: ValueError if there is no sweep.
    """
    store = SweepStore(url)
    plan = store.read_json(PLAN)
    if not isinstance(plan, dict) or plan.get("format") != "cacheprobe sweep":
        raise ValueError(f"{url} holds no sweep (it has no {PLAN}); give the folder that cacheprobe sweep wrote to")
    if plan["format_version"] != 1:
        raise ValueError(f"{url} is of sweep format {plan['format_version']}, this cacheprobe reads 1")
    return Sweep(store, refresh(store), plan, all_versions)


def duckdb() -> ModuleType:
    """Returns the duckdb library. Raises: ValueError if it is not installed."""
    try:
        return import_module("duckdb")
    except ModuleNotFoundError:
        raise ValueError("a query needs duckdb: pip install 'cacheprobe[sweep]'") from None
