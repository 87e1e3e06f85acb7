"""Reads the tables of a run on the disk, finished or not, without its states. Imports torch for the thoughts of an
unfinished run of a Thinking States model alone.

A run that is being recorded, or was not finished, consists of parts:

    run/
      journal.jsonl                     names the parts below: see journal.py
      rows-<id>-00000.parquet           and events, ledger, features: the tables of one part
      readings-<id>-00000.parquet       lens readings, in the columns of `LensReader.take`, sorted by request
      states-<id>-00000.safetensors     states of one part; the finished run keeps these files
      thoughts-<id>-00000.parquet and .safetensors  of a Thinking States model: chunk states, and the logits of the
                                        first word
      waiting-<id>-00000.safetensors    states of the rows that wait for their next token, of the newest part alone
      head_rows-<id>-00000.parquet      and others with head_: of a drafter's head

A run is finished by one table of each kind in place of those of the parts, and a manifest (see storage.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import ClassVar, Self

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.journal import Journal, read_journal
from cacheprobe.trace.manifest import (
    JOURNAL,
    MANIFEST,
    UNFINISHED,
    UNREAD,
    CheckedFiles,
    TraceError,
    of_head,
    read_manifest,
)  # fmt: skip
from cacheprobe.trace.tables.build import feature_table, hypotheses_table, reading_columns, recorded_lines
from cacheprobe.trace.tables.draft_verdicts import with_verdicts
from cacheprobe.trace.tables.schema import TABLES, arrow_schema, typed

UNDECIDED = "abandoned"
"""Role and status of a row whose draft token has no verdict in the journal."""
_READINGS_AT_ONCE = 60_000
"""Number of lens readings that are in memory together while a run is finished."""
REQUESTS_IN_MEMORY = 8
"""Number of requests whose readings stay in memory, in Arrow's compact form."""


class StoredRun:
    """Reads the tables of one saved run, each at its first use; lens readings are read for one request at a time.

    Columns are those of `trace.tables`. Raises: TraceError, when created, for a directory without a complete run.
    Twin: `load_trace(directory)`, whose tables hold the same lines, ==.
    """

    readings_kind: ClassVar[str] = "hypotheses"
    """First part of the names of the files with lens readings."""
    head: "Self | None" = None
    """Reads the tables of the drafter's head, whose rows are those of its passes; None if the run has none."""

    def __init__(self, directory: "str | Path", manifest: JsonDict | None = None) -> None:
        """Opens a run. manifest: of the directory, or `of_head` of it, if it was read before."""
        manifest = read_manifest(Path(directory)) if manifest is None else manifest
        if (its_head := of_head(manifest)) is not None:
            self.head = type(self)(directory, its_head)
        self._describe(manifest, CheckedFiles(Path(directory), manifest))
        self.files.require_whole()
        self.meta: JsonDict = manifest["meta"]
        self.requests: list[JsonDict] = manifest["requests"]
        """One object for each request: request_id, prompt, prompt_token_ids, is_deterministic, committed_token_ids,
        text, example and others."""

    def _describe(self, header: JsonDict, files: CheckedFiles) -> None:
        """Sets what a finished and a growing run have alike. header: with the run's id, sites, heads and layers."""
        self.directory, self.files = files.directory, files
        self.run_id: str = header["run_id"]
        """Id of the run, which its file names hold."""
        self.version = f"{files.prefix}{self.run_id}"
        """Names what was read: the run's id; of a growing run also its number of parts."""
        self.sites, self.heads = tuple(header["sites"]), tuple(header["heads"])
        self.layers, self.modules = tuple(header["layers"]), dict(header.get("modules", {}))
        self.shards = files.names("states", "safetensors")
        """Names of the files of states, in the order of their rows."""
        self._lock = Lock()
        self._held: dict[int, dict[str, pa.Table]] = {}
        """Stored readings of a few requests, by file, the request that was read last at the end."""

    def __repr__(self) -> str:
        requests = f"{len(self.requests)} requests of {self.fingerprint['model']}"
        return f"{type(self).__name__}({self.directory.name}: {requests})"

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
        return {kind: names[-1] for kind in TABLES if (names := self.files.names(kind))}

    def _table(
        self, kind: str, before: pd.DataFrame | None = None, names: "Sequence[str] | None" = None
    ) -> pd.DataFrame:
        """Returns the table of one kind, joined over its files; without a line if there is none. before: what the table
        has before the files `names`. Raises: TraceError if a file is damaged."""
        names = self.files.names(kind) if names is None else names
        parts = [typed(self.files.table(name).to_pandas(), kind) for name in names]
        parts = parts if before is None else [before, *parts]
        return parts[0] if len(parts) == 1 else pd.concat([typed([], kind), *parts], ignore_index=True)

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Rows table of the run: a DataFrame with one line for each token of each pass."""
        return self._table("rows")

    @cached_property
    def events(self) -> pd.DataFrame:
        """Events table of the run: a DataFrame with one line for each request in each step (mostly a pass)."""
        return self._table("events")

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """Ledger table of the run: a DataFrame with one line for each change of a request's cached slots.

        `trace.tables.build.ledger_at` gives the slots after a step.
        """
        return self._table("ledger")

    @cached_property
    def token_table(self) -> pd.DataFrame:
        """Tokens table of the run: token_id and token, one line for every token of its rows, events and readings."""
        return self._table("tokens")

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
        return self._table("thoughts") if self.files.names("thoughts") else None

    @cached_property
    def feature_table(self) -> pd.DataFrame | None:
        """Recorded features: row, rank, feature and activation; None for a run without a dictionary."""
        capture = self.meta.get("capture", {})
        if capture.get("dictionary") is None:
            return None
        return feature_table(self._table("features"), self.rows, capture["statuses"])

    @cached_property
    def features(self) -> pd.DataFrame | None:
        """Recorded features of a dictionary, in the columns of `Trace.features`; None for a run without."""
        found = self.feature_table
        return None if found is None else recorded_lines(self.rows, found, self.meta["capture"]["dictionary"])

    @property
    def has_readings(self) -> bool:
        """True if the run contains lens readings."""
        return bool(self.files.names(self.readings_kind))

    @property
    def is_unread(self) -> bool:
        """True if the run was made with lens="later" and saved before its Z was read."""
        return bool(self.meta.get("is_lens_later"))

    def all_readings(self) -> pd.DataFrame | None:
        """Returns the lens readings of the whole run, without verdicts; None if there are none."""
        return self._table("hypotheses") if self.has_readings else None

    def readings(self, request_id: int, positions: range | None = None) -> pd.DataFrame:
        """Returns the lens readings of one request as a DataFrame, one line for each row and layer, rolled-back rows
        included and thoughts left out. Of a growing run, a row whose next token is open has none yet.

        positions: only readings of rows at these positions; None for all.
        Raises: ValueError if the run has no lens readings.
        """
        self._require_readings()
        own = self.rows[self.rows.request_id == request_id]
        if positions is not None:
            own = own[own.position.isin(positions)]
        events = self.events[self.events.request_id == request_id]
        table = self._hypotheses(self._request_readings(request_id), own)
        return with_verdicts(table, own, events, self._prompt_lengths, self.token_texts)

    def readings_of_rows(self, rows: Sequence[int], columns: Sequence[str]) -> pd.DataFrame:
        """Returns some columns of the lens readings of some rows, as a DataFrame with one line for each row and layer.
        Reads only those parts of the files that hold one of the rows.

        rows: row numbers.  Raises: ValueError if the run has no lens readings.
        """
        self._require_readings()
        return self._hypotheses(self._stored_readings("row", rows), self.rows[self.rows.row.isin(rows)])[list(columns)]

    def _stored_readings(self, key: str, values: Sequence[int]) -> pa.Table:
        """Returns the stored readings whose column `key` holds one of `values`."""
        names = self.files.names(self.readings_kind)
        return self._joined_readings(self.files.lines(name, key, values) for name in names)

    def _request_readings(self, request_id: int) -> pa.Table:
        """Returns the stored readings of one request. Reads no file twice for one of the newest 8 requests."""
        names = self.files.names(self.readings_kind)
        with self._lock:
            held = self._held.pop(request_id, {})
            new = {name: self.files.lines(name, "request_id", [request_id]) for name in names if name not in held}
            held = self._held[request_id] = held | new
            while len(self._held) > REQUESTS_IN_MEMORY:
                del self._held[next(iter(self._held))]
        return self._joined_readings(held[name] for name in names)

    def _joined_readings(self, parts: Iterable[pa.Table]) -> pa.Table:
        found = list(parts)
        return pa.concat_tables(found) if found else arrow_schema(self.readings_kind).empty_table()

    def _hypotheses(self, readings: pa.Table, rows: pd.DataFrame) -> pd.DataFrame:
        """Returns stored readings of these rows as `tables.build.hypotheses_table`."""
        return readings.filter(pc.is_in(readings["row"], value_set=pa.array(rows.row.to_numpy()))).to_pandas()

    @property
    def _prompt_lengths(self) -> dict[int, int]:
        """Number of prompt tokens of each request, by request id."""
        return {request["request_id"]: len(request["prompt_token_ids"]) for request in self.requests}

    def _require_readings(self) -> None:
        """Raises: ValueError if the run has no lens readings, with the reason."""
        if not self.has_readings:
            raise ValueError(UNREAD if self.is_unread else "this run read no lens; run it with 'Z' in capture=")


class GrowingRun(StoredRun):
    """Reads the tables of a run that is being recorded, or was not finished, up to its newest part. Does not change:
    `read_on` returns another object.

    Twin: `load_trace(directory)`, whose tables hold the same lines, ==.
    """

    readings_kind = "readings"

    def __init__(self, journal: Journal, before: "GrowingRun | None" = None) -> None:
        """Reads the parts of a journal. before: the run up to an earlier part of it, whose tables are not read
        again."""
        self.journal = journal
        self._describe(journal.header, journal.files)
        self.version += f"-{len(journal.parts)}"
        if (its_head := journal.head) is not None:
            self.head = type(self)(its_head, before and before.head)
        self.meta = _meta(journal)
        tokens, texts = journal.tokens, journal.texts
        self.requests = [
            {**request, "committed_token_ids": tokens[request["request_id"]], "text": texts[request["request_id"]]}
            for request in journal.header["requests"]
        ]
        if before is not None:
            self._lock, self._held = before._lock, before._held
        known = {} if before is None else before.files.sizes
        for kind in ("rows", "events", "ledger"):
            names = [name for name in self.files.names(kind) if name not in known]
            setattr(self, kind, self._table(kind, before and getattr(before, kind), names))
        self.rows = self._labelled(self.rows, 0 if before is None else len(before.journal.parts))

    def read_on(self) -> "GrowingRun | None":
        """Returns the run with the parts that were written since; itself if there are none. Reads the tables of the new
        parts alone. Returns None if the directory holds another run, or none. Raises: TraceError for a damaged part."""
        path = self.directory / JOURNAL
        if path.exists() and path.stat().st_size == self.journal.num_bytes:
            return self
        journal = read_journal(self.directory)
        journal = journal.head if journal is not None and self.files.prefix else journal
        if journal is None or journal.run_id != self.run_id or journal.num_bytes < self.journal.num_bytes:
            return None
        return self if journal == self.journal else GrowingRun(journal, self)

    @property
    def table_files(self) -> dict[str, str]:
        """Names of the Parquet files of whole tables: none, because each part has its own."""
        return {}

    def _labelled(self, rows: pd.DataFrame, since: int) -> pd.DataFrame:
        """Returns a copy of the rows table with role, status and state_index filled in.

        A row can get these values in a later part of the journal than its own. since: number of the first part whose
        values are filled in. A row that still has no role gets "abandoned" as its role and status.
        """
        names = ("role", "status", "state_index")
        rows = rows.assign(**{name: rows[name].to_numpy(copy=True) for name in names})
        labelled = [line for part in self.journal.parts[since:] for line in part["labelled"]]
        for i, name in enumerate(names, 1):
            values = {line[0]: line[i] for line in labelled}
            rows.loc[list(values), name] = list(values.values())
        rows.loc[rows.role == "", ["role", "status"]] = UNDECIDED
        return rows

    @cached_property
    def thoughts(self) -> pd.DataFrame | None:
        """Thoughts table of the run so far; None without thoughts."""
        of_lines, of_tensors = (self.files.names("thoughts", ending) for ending in ("parquet", "safetensors"))
        if not of_lines:
            return None
        from cacheprobe.trace.state_store import read_tensors
        from cacheprobe.trace.tables.thoughts import thoughts_table

        parts = []
        for name, tensors in zip(of_lines, of_tensors, strict=True):  # the logits of one part at a time
            logits = read_tensors(self.files, tensors, ["first_logits"])["first_logits"]
            lines = self.files.table(name).to_pandas()
            parts.append(thoughts_table(lines, logits, self.rows, self.journal.tokens))
        table = pd.concat(parts, ignore_index=True)
        return table.assign(thought=range(len(table)))

    @cached_property
    def token_table(self) -> pd.DataFrame:
        """Tokens table of the run so far."""
        return typed([(i, visible(text)) for i, text in sorted(self.journal.token_texts.items())], "tokens")

    # -- lens readings

    @property
    def has_readings(self) -> bool:
        """True if the run records lens readings."""
        return "Z" in (self.meta["capture"]["sites"] or "") and not self.is_unread

    def all_readings(self) -> pd.DataFrame | None:
        """Returns the lens readings of the whole run so far, without verdicts; None if there are none."""
        pieces = list(self.reading_pieces())
        return pd.concat(pieces, ignore_index=True) if pieces else None

    def reading_pieces(self) -> Iterator[pd.DataFrame]:
        """Yields the table of lens readings in pieces that are sorted like the whole: requests in order. Requests on
        which the lens failed have none."""
        failed = {int(request_id) for request_id in self.journal.gathered("lens_errors")}
        rows = self.rows[~self.rows.request_id.isin(failed)]
        counts = rows.groupby("request_id").size().mul(max(len(self.layers), 1))
        for _, numbers in counts.groupby(counts.cumsum() // _READINGS_AT_ONCE):
            if len(found := self._stored_readings("request_id", numbers.index.tolist())):
                yield self._hypotheses(found, rows[rows.request_id.isin(numbers.index)])

    def _hypotheses(self, readings: pa.Table, rows: pd.DataFrame) -> pd.DataFrame:
        """Returns stored readings of these rows as `tables.build.hypotheses_table`."""
        own = readings.filter(pc.is_in(readings["row"], value_set=pa.array(rows.row.to_numpy())))
        return hypotheses_table(
            reading_columns(own), rows, self.meta["lens"], lambda ids: [self.token_texts[i] for i in ids]
        )


def _meta(journal: Journal) -> JsonDict:
    """Returns the metadata of the run so far, as in `Trace.meta`; "growing" says how many parts it has."""
    last: Mapping[str, object] = journal.parts[-1] if journal.parts else {}
    ends = {str(request["request_id"]): UNFINISHED for request in journal.header["requests"]}
    return {
        **journal.header["meta"],
        **{name: last[name] for name in ("checks", "preemptions", "self_checks") if name in last},
        "finish": ends | journal.gathered("finish"),
        "errors": journal.gathered("errors"),
        "growing": {"parts": len(journal.parts)},
    }


def open_run(directory: "str | Path") -> StoredRun:
    """Returns a reader of the run in a directory, finished or not. Raises: TraceError if there is none, or if it is
    damaged."""
    journal = None if (Path(directory) / MANIFEST).exists() else read_journal(Path(directory))
    return StoredRun(directory) if journal is None else GrowingRun(journal)


def growing_run(directory: "str | Path") -> "GrowingRun":
    """Returns a reader of the unfinished run in a directory. Raises: TraceError if there is none, or if it is
    damaged."""
    journal = read_journal(Path(directory))
    if journal is None:
        raise TraceError(f"{directory} has no {JOURNAL}; give the directory that a run is recorded in")
    return GrowingRun(journal)


def duckdb() -> ModuleType:
    """Imports and returns the module duckdb. Raises: ValueError if it is not installed."""
    try:
        return import_module("duckdb")
    except ModuleNotFoundError:
        raise ValueError("a query needs duckdb: pip install 'cacheprobe[sweep]', or duckdb alone") from None
