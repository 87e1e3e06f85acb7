"""Gives a table of a trace as a DuckDB relation, which reads from the disk only what a query needs."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from cacheprobe.core.values import hint
from cacheprobe.trace.data import TraceData
from cacheprobe.trace.manifest import TraceError
from cacheprobe.trace.parts.shards import ShardStore
from cacheprobe.trace.storage import TABLES
from cacheprobe.trace.tables.schema import arrow_table

if TYPE_CHECKING:
    from duckdb import DuckDBPyRelation


def relation_of(trace: TraceData, name: str) -> "DuckDBPyRelation":
    """Returns a table of a trace as a DuckDB relation. name: of `storage.TABLES`.

    Of a saved run, the file is compared with its checksums, and DuckDB then reads the columns and row groups that a
    query needs. Other traces have the table in memory.
    Raises: ValueError for an unknown table, one that the run does not have, and without duckdb; TraceError for a file
    that differs from its checksums.
    """
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; tables are {', '.join(TABLES)}{hint(name, TABLES)}")
    database, file = duckdb().connect(), trace.table_files.get(name)
    if file is not None and isinstance(trace.store, ShardStore):
        files = trace.store.files
        if fault := files.fault(file):
            raise TraceError(f"{files.directory}: {fault}; run it again or restore the file")
        return database.read_parquet(str(files.directory / file))
    if name == "tokens":
        assert trace.token_texts  # builds the table if the run has none
    table = getattr(trace, "hypothesis_table" if name == "hypotheses" else TABLES[name])
    if table is None:
        raise ValueError(f"this run has no table of {name}")
    return database.from_arrow(arrow_table(table, name))


def duckdb() -> ModuleType:
    """Imports and returns the module duckdb. Raises: ValueError if it is not installed."""
    try:
        return import_module("duckdb")
    except ModuleNotFoundError:
        raise ValueError("a query needs duckdb: pip install 'cacheprobe[sweep]', or duckdb alone") from None
