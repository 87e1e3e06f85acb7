"""Reads the tables of a saved run one by one, without torch and without the states."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.checked_files import CheckedFiles
from cacheprobe.trace.manifest import UNREAD, TraceError, read_manifest, require_whole
from cacheprobe.trace.migrate import migrated_events, migrated_readings, migrated_rows, renamed_status
from cacheprobe.trace.tables.draft_verdicts import with_verdicts
from cacheprobe.trace.tables.recorded_features import recorded_lines
from cacheprobe.trace.tables.schema import typed

REQUESTS_IN_MEMORY = 8
"""Number of requests whose readings stay in memory, in Arrow's compact form."""


class StoredRun:
    """Reads the tables of one saved run, each at its first use; lens readings are read for one request at a time.

    Columns are those of `trace.tables`. Raises: TraceError, when created, for a directory without a complete run.
    Twin: `load_trace(directory)`, whose tables hold the same lines, ==.
    """

    def __init__(self, directory: "str | Path") -> None:
        self.directory = Path(directory)
        self._manifest = read_manifest(self.directory)
        require_whole(self.directory, self._manifest)
        self._files = CheckedFiles(self.directory, self._manifest)
        self.meta: JsonDict = self._manifest["meta"]
        self.requests: list[JsonDict] = self._manifest["requests"]
        """One object for each request: request_id, prompt, prompt_token_ids, is_deterministic, committed_token_ids,
        text, example and others."""
        self.sites = tuple(self._manifest["sites"])
        self.layers = tuple(self._manifest["layers"])
        self._request_readings = lru_cache(maxsize=REQUESTS_IN_MEMORY)(self._read_readings)

    def __repr__(self) -> str:
        return f"StoredRun({self.directory.name}: {len(self.requests)} requests of {self.fingerprint['model']})"

    @property
    def run_id(self) -> str:
        """Id of the run, which its file names hold."""
        return self._manifest["run_id"]

    @property
    def version(self) -> str:
        """Names what was read: the run's id; of a run that is recorded also its number of parts."""
        return self.run_id

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

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Rows table of the saved run: a DataFrame with one line for each token of each pass."""
        rows = self._read_table("rows")
        if not self._has_table("tokens"):
            rows = migrated_rows(rows, self.events, self._prompt_lengths)
        return renamed_status(rows, self._manifest["stored_version"])

    @cached_property
    def events(self) -> pd.DataFrame:
        """Events table of the saved run: a DataFrame with one line for each request in each step (mostly a pass)."""
        return self._read_table("events")

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """Ledger table of the saved run: a DataFrame with one line for each change of a request's cached slots.

        `trace.tables.ledgers.ledger_at` gives the slots after a step.
        """
        return self._read_table("ledger")

    @cached_property
    def thoughts(self) -> pd.DataFrame | None:
        """Thoughts table of the saved run, one line for each thought of a Thinking States model; None for a run without
        thoughts.
        """
        if not self._has_table("thoughts"):
            return None
        thoughts = self._read_table("thoughts")
        if not self._has_table("tokens"):
            thoughts = migrated_readings(thoughts, self.rows)
        return renamed_status(thoughts, self._manifest["stored_version"])

    @cached_property
    def features(self) -> pd.DataFrame | None:
        """Features of a dictionary that were recorded, in the columns of `Trace.features`; None for a run without."""
        if not self._has_table("features"):
            return None
        return recorded_lines(self.rows, self._read_table("features"), self.meta["capture"]["dictionary"])

    @property
    def has_readings(self) -> bool:
        """True if the saved run contains lens readings."""
        return self._has_table("hypotheses")

    @property
    def is_unread(self) -> bool:
        """True if the run was made with lens="later" and saved before its Z was read."""
        return bool(self.meta.get("is_lens_later"))

    def readings(self, request_id: int, positions: range | None = None) -> pd.DataFrame:
        """Returns the lens readings of one request as a DataFrame, one line for each row and layer, rolled-back rows
        included and thoughts left out.

        positions: only readings of rows at these positions; None for all.
        Raises: ValueError if the run has no lens readings.
        """
        table = self._request_readings(request_id)
        if positions is not None:
            position = table["position"]
            inside = pc.and_(pc.greater_equal(position, positions.start), pc.less(position, positions.stop))
            table = table.filter(inside)
        readings = table.to_pandas()
        if not self._has_table("tokens"):
            readings = migrated_readings(readings, self.rows)
        readings = renamed_status(readings, self._manifest["stored_version"])
        events = self.events[self.events.request_id == request_id]
        return with_verdicts(readings, self.rows, events, self._prompt_lengths, self.token_texts)

    def readings_of_rows(self, rows: Sequence[int], columns: Sequence[str]) -> pd.DataFrame:
        """Returns some columns of the lens readings of some rows, as a DataFrame with one line for each row and layer.
        Reads only those parts of the file that hold one of the rows.

        rows: row numbers.  columns: numbers and lists of numbers alone.
        Raises: ValueError if the run has no lens readings.
        """
        self._require_readings()
        name, wanted = self._file("hypotheses"), np.unique(np.asarray(rows, dtype=np.int64))
        file, found = self._files.parquet(name), []
        column = file.schema_arrow.get_field_index("row")
        with self._files.naming(name):
            for number in range(file.num_row_groups):
                statistics = file.metadata.row_group(number).column(column).statistics
                if statistics is not None:
                    low, high = np.searchsorted(wanted, [statistics.min, statistics.max + 1])
                    if low == high:
                        continue
                is_wanted = pc.is_in(file.read_row_group(number, ["row"])["row"], value_set=pa.array(wanted))
                if pc.any(is_wanted).as_py():
                    found.append(file.read_row_group(number, list(columns)).filter(is_wanted))
            if not found:
                found = [file.schema_arrow.empty_table().select(list(columns))]
            return pa.concat_tables(found).to_pandas()

    @property
    def _prompt_lengths(self) -> dict[int, int]:
        """Number of prompt tokens of each request, by request id."""
        return {request["request_id"]: len(request["prompt_token_ids"]) for request in self.requests}

    @cached_property
    def token_texts(self) -> dict[int, str]:
        """Dict from token id to text (signs such as ␣ for white space), for every token of the run's tokens table. For
        a run stored without this table: for the tokens of its rows and readings tables."""
        if self._has_table("tokens"):
            table = self._read_table("tokens")
            return dict(zip(table.token_id.tolist(), table.token.tolist(), strict=True))
        texts = dict(zip(self.rows.token_id.tolist(), self.rows.token.tolist(), strict=True))
        if self._has_table("hypotheses"):
            for number, text in (("token_id", "token"), ("committed_token_id", "committed_token")):
                ids = self._files.table(self._file("hypotheses"), [number])[number].combine_chunks()
                lacking = pa.array(set(pc.unique(ids).to_pylist()) - {None, *texts}, ids.type)
                if len(lacking):  # the column of texts is a hundred times larger than that of ids, so read it last
                    said = self._files.table(self._file("hypotheses"), [text])[text]
                    added = said.take(pc.index_in(lacking, value_set=ids))
                    texts |= {t: visible(s) for t, s in zip(lacking.to_pylist(), added.to_pylist(), strict=True)}
        return texts

    def _read_readings(self, request_id: int) -> pa.Table:
        """Returns the stored lens readings of one request as a pyarrow Table. Raises: ValueError if there are none."""
        self._require_readings()
        name = self._file("hypotheses")
        file = self._files.parquet(name)
        column = file.schema_arrow.get_field_index("request_id")
        groups = []
        for number in range(file.num_row_groups):
            statistics = file.metadata.row_group(number).column(column).statistics
            if statistics is None or statistics.min <= request_id <= statistics.max:
                groups.append(number)
        with self._files.naming(name):
            table = file.read_row_groups(groups)
        return table.filter(pc.equal(table["request_id"], request_id))

    def _require_readings(self) -> None:
        """Raises: ValueError if the run has no lens readings, with the reason."""
        if not self.has_readings:
            raise ValueError(UNREAD if self.is_unread else "this run read no lens; run it with 'Z' in capture=")

    def _file(self, name: str) -> str:
        """Returns the name of a table's Parquet file."""
        return f"{name}-{self._manifest['run_id']}.parquet"

    def _has_table(self, name: str) -> bool:
        """Returns True if the run has this table."""
        return self._file(name) in self._manifest["files"]

    def _read_table(self, name: str) -> pd.DataFrame:
        """Reads a whole table of the saved run. Raises: TraceError if the run has no such table, or if it is
        damaged."""
        if not self._has_table(name):
            raise TraceError(f"{self.directory} holds no table of {name}; run it again")
        return typed(migrated_events(self._files.table(self._file(name)).to_pandas()), name)
