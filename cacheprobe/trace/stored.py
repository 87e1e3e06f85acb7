"""Reads the tables of a saved run one by one, without torch and without the states."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import UNREAD, CheckedFiles, read_manifest, require_whole
from cacheprobe.trace.tables.build import recorded_lines
from cacheprobe.trace.tables.draft_verdicts import with_verdicts
from cacheprobe.trace.tables.schema import typed

REQUESTS_IN_MEMORY = 8
"""Number of requests whose readings stay in memory, in Arrow's compact form."""


class StoredRun:
    """Reads the tables of one saved run, each at its first use; lens readings are read for one request at a time.

    Columns are those of `trace.tables`. Raises: TraceError, when created, for a directory without a complete run.
    Twin: `load_trace(directory)`, whose tables hold the same lines, ==.
    """

    def __init__(self, directory: "str | Path") -> None:
        manifest = read_manifest(Path(directory))
        require_whole(Path(directory), manifest)
        self._describe(Path(directory), manifest, manifest)
        self.meta: JsonDict = manifest["meta"]
        self.requests: list[JsonDict] = manifest["requests"]
        """One object for each request: request_id, prompt, prompt_token_ids, is_deterministic, committed_token_ids,
        text, example and others."""
        self.shards: list[str] = manifest["shards"]
        """Names of the files of states, in the order of their rows."""
        states = f"thoughts-{self.run_id}.safetensors"
        self.thought_files = [states] if states in self.files.sizes else []
        """Names of the files with the chunk states of thoughts."""

    def _describe(self, directory: Path, header: JsonDict, sums: JsonDict) -> None:
        """Sets what a finished and a growing run have alike. header: with the run's id, sites, heads and layers.  sums:
        sizes and checksums of the run's files."""
        self.directory, self.files = directory, CheckedFiles(directory, sums)
        self.run_id: str = header["run_id"]
        """Id of the run, which its file names hold."""
        self.version = self.run_id
        """Names what was read: the run's id; of a growing run also its number of parts."""
        self.sites, self.heads = tuple(header["sites"]), tuple(header["heads"])
        self.layers = tuple(header["layers"])
        self._request_readings = lru_cache(maxsize=REQUESTS_IN_MEMORY)(self._read_readings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.directory.name}: {len(self.requests)} requests of {self._model_name})"

    @property
    def _model_name(self) -> str:
        return self.fingerprint["model"]

    @property
    def fingerprint(self) -> JsonDict:
        """Settings, as a dict, that the bits of the run's results depend on; as in `Trace.fingerprint`."""
        return self.meta["fingerprint"]

    def request(self, request_id: int) -> JsonDict:
        """Returns the stored JSON object of one request: prompt, token ids, text and more. Raises: KeyError for an
        unknown request.
        """
        if not 0 <= request_id < len(self.requests):
            raise KeyError(f"no request {request_id} in this run; it has 0 to {len(self.requests) - 1}")
        return self.requests[request_id]

    @property
    def table_files(self) -> dict[str, str]:
        """Names of the Parquet files of whole tables, by table."""
        suffix = f"-{self.run_id}.parquet"
        return {name.removesuffix(suffix): name for name in self.files.sizes if name.endswith(suffix)}

    def _table(self, name: str) -> pd.DataFrame | None:
        """Returns a whole table of the run; None if it has none. Raises: TraceError if it is damaged."""
        file = self.table_files.get(name)
        return None if file is None else typed(self.files.table(file).to_pandas(), name)

    def _required(self, name: str) -> pd.DataFrame:
        table = self._table(name)
        assert table is not None  # every run has it
        return table

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Rows table of the run: a DataFrame with one line for each token of each pass."""
        return self._required("rows")

    @cached_property
    def events(self) -> pd.DataFrame:
        """Events table of the run: a DataFrame with one line for each request in each step (mostly a pass)."""
        return self._required("events")

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """Ledger table of the run: a DataFrame with one line for each change of a request's cached slots.

        `trace.tables.build.ledger_at` gives the slots after a step.
        """
        return self._required("ledger")

    @cached_property
    def token_table(self) -> pd.DataFrame:
        """Tokens table of the run: token_id and token, one line for every token of its rows, events and readings."""
        return self._required("tokens")

    @cached_property
    def token_texts(self) -> dict[int, str]:
        """Dict from token id to text (signs such as ␣ for white space), for every token of the tokens table."""
        table = self.token_table
        return dict(zip(table.token_id.tolist(), table.token.tolist(), strict=True))

    @cached_property
    def thoughts(self) -> pd.DataFrame | None:
        """Thoughts table of the run, one line for each thought of a Thinking States model; None for a run without
        thoughts.
        """
        return self._table("thoughts")

    @cached_property
    def feature_table(self) -> pd.DataFrame | None:
        """Recorded features: row, rank, feature and activation; None for a run without a dictionary."""
        return self._table("features")

    @cached_property
    def features(self) -> pd.DataFrame | None:
        """Recorded features of a dictionary, in the columns of `Trace.features`; None for a run without."""
        found = self.feature_table
        return None if found is None else recorded_lines(self.rows, found, self.meta["capture"]["dictionary"])

    @property
    def has_readings(self) -> bool:
        """True if the run contains lens readings."""
        return "hypotheses" in self.table_files

    @property
    def is_unread(self) -> bool:
        """True if the run was made with lens="later" and saved before its Z was read."""
        return bool(self.meta.get("is_lens_later"))

    def all_readings(self) -> pd.DataFrame | None:
        """Returns the lens readings of the whole run, without verdicts; None if there are none."""
        return self._table("hypotheses")

    def readings(self, request_id: int, positions: range | None = None) -> pd.DataFrame:
        """Returns the lens readings of one request as a DataFrame, one line for each row and layer, rolled-back rows
        included and thoughts left out. Of a growing run, a row whose next token is open has none yet.

        positions: only readings of rows at these positions; None for all.
        Raises: ValueError if the run has no lens readings.
        """
        self._require_readings()
        table = self._request_readings(request_id)
        if positions is not None:
            position = table["position"]
            inside = pc.and_(pc.greater_equal(position, positions.start), pc.less(position, positions.stop))
            table = table.filter(inside)
        events = self.events[self.events.request_id == request_id]
        return with_verdicts(table.to_pandas(), self.rows, events, self._prompt_lengths, self.token_texts)

    def readings_of_rows(self, rows: Sequence[int], columns: Sequence[str]) -> pd.DataFrame:
        """Returns some columns of the lens readings of some rows, as a DataFrame with one line for each row and layer.
        Reads only those parts of the files that hold one of the rows.

        rows: row numbers.  columns: numbers and lists of numbers alone.
        Raises: ValueError if the run has no lens readings.
        """
        self._require_readings()
        return self.lines(self.table_files["hypotheses"], "row", rows, columns).to_pandas()

    def lines(self, file: str, key: str, values: Sequence[int], columns: "Sequence[str] | None" = None) -> pa.Table:
        """Returns the lines of a stored table whose column `key` holds one of `values`. Reads only those parts of the
        file that can hold one. columns: some of the table's columns; None for all."""
        wanted = np.unique(np.asarray(values, dtype=np.int64))
        parquet = self.files.parquet(file)
        column = parquet.schema_arrow.get_field_index(key)
        found = []
        with self.files.naming(file):
            for number in range(parquet.num_row_groups):
                statistics = parquet.metadata.row_group(number).column(column).statistics
                if statistics is None or not statistics.has_min_max:  # of no line
                    continue
                low, high = np.searchsorted(wanted, [statistics.min, statistics.max + 1])
                if low == high:
                    continue
                is_wanted = pc.is_in(parquet.read_row_group(number, [key])[key], value_set=pa.array(wanted))
                if pc.any(is_wanted).as_py():
                    found.append(parquet.read_row_group(number, columns).filter(is_wanted))
            schema = parquet.schema_arrow
            nothing = schema.empty_table() if columns is None else schema.empty_table().select(columns)
            return pa.concat_tables(found or [nothing])

    @property
    def _prompt_lengths(self) -> dict[int, int]:
        """Number of prompt tokens of each request, by request id."""
        return {request["request_id"]: len(request["prompt_token_ids"]) for request in self.requests}

    def _read_readings(self, request_id: int) -> pa.Table:
        """Returns the stored lens readings of one request."""
        return self.lines(self.table_files["hypotheses"], "request_id", [request_id])

    def _require_readings(self) -> None:
        """Raises: ValueError if the run has no lens readings, with the reason."""
        if not self.has_readings:
            raise ValueError(UNREAD if self.is_unread else "this run read no lens; run it with 'Z' in capture=")


def duckdb() -> ModuleType:
    """Imports and returns the module duckdb. Raises: ValueError if it is not installed."""
    try:
        return import_module("duckdb")
    except ModuleNotFoundError:
        raise ValueError("a query needs duckdb: pip install 'cacheprobe[sweep]', or duckdb alone") from None
