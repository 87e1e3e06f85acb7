"""Reads a run that is being recorded to disk, or that was not finished, from its parts. Does not import torch, except
for the thoughts of a Thinking States model.

    run/
      journal.jsonl                     names the parts below: see journal.py
      rows-<id>-00000.parquet           and events, ledger, features: the tables of one part
      readings-<id>-00000.parquet       lens readings, in the columns of `LensReader.take`, sorted by request
      states-<id>-00000.safetensors     states of one part; the finished run keeps these files
      thoughts-<id>-00000.parquet and .safetensors  of a Thinking States model: chunk states, and the logits of the
                                        first word
      waiting-<id>-00000.safetensors    states of the rows that wait for their next token, of the newest part alone

A run is finished by one table of each kind in place of those of the parts, and a manifest (see storage.py).
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import JOURNAL, MANIFEST, UNFINISHED, TraceError
from cacheprobe.trace.parts.journal import Journal, read_journal, read_on
from cacheprobe.trace.stored import REQUESTS_IN_MEMORY, StoredRun
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.draft_verdicts import with_verdicts
from cacheprobe.trace.tables.schema import arrow_schema, typed

UNDECIDED = "given_up"
"""Role and status of a row whose draft token has no verdict in the journal."""
_READINGS_AT_ONCE = 60_000
"""Number of lens readings that are in memory together while a run is finished."""


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


class GrowingRun(StoredRun):
    """Reads the tables of a run that is being recorded, or was not finished, up to its newest part. Does not change:
    `read_on` returns another object.

    Twin: `load_trace(directory)`, whose tables hold the same lines, ==.
    """

    def __init__(self, journal: Journal, before: "GrowingRun | None" = None) -> None:
        """Reads the parts of a journal. before: the run up to an earlier part of it, whose tables are not read
        again."""
        self.journal = journal
        self._describe(journal.directory, journal.header, journal.checksums)
        self.version = f"{self.run_id}-{len(journal.parts)}"
        self.meta = _meta(journal)
        tokens, texts = journal.tokens, journal.texts
        self.requests = [
            {**request, "committed_token_ids": tokens[request["request_id"]], "text": texts[request["request_id"]]}
            for request in journal.header["requests"]
        ]
        self.shards = journal.names("states")
        self.thought_files = journal.names("thoughts")[1::2]
        self._texts = journal.token_texts
        self._held = _HeldReadings() if before is None else before._held
        since = 0 if before is None else len(before.journal.parts)
        self.rows = self._labelled(self._joined("rows", before and before.rows, since), since)
        self.events = self._joined("events", before and before.events, since)
        self.ledger = self._joined("ledger", before and before.ledger, since)

    def read_on(self) -> "GrowingRun | None":
        """Returns the run with the parts that were written since; itself if there are none. Reads the new parts alone.
        Returns None if the directory holds another run, or none. Raises: TraceError for a damaged part."""
        journal = read_on(self.journal)
        if journal is None or journal is self.journal:
            return None if journal is None else self
        return GrowingRun(journal, self)

    @property
    def table_files(self) -> dict[str, str]:
        """Names of the Parquet files of whole tables: none, because each part has its own."""
        return {}

    def _joined(self, kind: str, before: pd.DataFrame | None = None, since: int = 0) -> pd.DataFrame:
        """Returns the table of one kind, joined over the parts. before: the table up to part number `since`."""
        names = [name for part in self.journal.parts[since:] for name in part["names"].get(kind, ())]
        if before is not None and not names:
            return before
        parts = [typed([], kind) if before is None else before]
        parts += [typed(self.files.table(name).to_pandas(), kind) for name in names]
        return pd.concat(parts, ignore_index=True)

    def _labelled(self, rows: pd.DataFrame, since: int) -> pd.DataFrame:
        """Returns the rows table with what the parts from number `since` on gave to earlier rows: role, status and
        state_index. `rows` is unchanged."""
        names = ("role", "status", "state_index")
        rows = rows.assign(**{name: rows[name].to_numpy(copy=True) for name in names})
        labelled = [line for part in self.journal.parts[since:] for line in part["labelled"]]
        for i, name in enumerate(names, 1):
            values = {line[0]: line[i] for line in labelled}
            rows.loc[list(values), name] = list(values.values())
        rows.loc[rows.role == "", ["role", "status"]] = UNDECIDED
        return rows

    @cached_property
    def feature_table(self) -> pd.DataFrame | None:
        """Recorded features so far: row, rank, feature and activation; None for a run without a dictionary."""
        capture = self.meta.get("capture", {})
        if capture.get("dictionary") is None:
            return None
        return tables.feature_table(self._joined("features"), self.rows, capture["statuses"])

    @cached_property
    def thoughts(self) -> pd.DataFrame | None:
        """Thoughts table of the run so far; None without thoughts."""
        names = self.journal.names("thoughts")
        if not names:
            return None
        from cacheprobe.trace.parts.shards import read_tensors
        from cacheprobe.trace.tables.thoughts import thoughts_table

        parts = []
        for of_lines, of_tensors in zip(names[::2], names[1::2], strict=True):  # the logits of one part at a time
            logits = read_tensors(self.files, of_tensors, ["first_logits"])["first_logits"]
            lines = self.files.table(of_lines).to_pandas()
            parts.append(thoughts_table(lines, logits, self.rows, self.journal.tokens))
        table = pd.concat(parts, ignore_index=True)
        return table.assign(thought=range(len(table)))

    @cached_property
    def token_texts(self) -> dict[int, str]:
        """Dict from token id to text (signs such as ␣ for white space), for every token so far."""
        return {token_id: visible(text) for token_id, text in self._texts.items()}

    @cached_property
    def token_table(self) -> pd.DataFrame:
        """Tokens table of the run so far."""
        return typed(sorted(self.token_texts.items()), "tokens")

    # -- lens readings

    @property
    def has_readings(self) -> bool:
        """True if the run records lens readings."""
        return "Z" in (self.meta["capture"]["sites"] or "") and not self.is_unread

    def readings(self, request_id: int, positions: range | None = None) -> pd.DataFrame:
        """Returns the lens readings of one request so far, as `StoredRun.readings`."""
        self._require_readings()
        own = self.rows[self.rows.request_id == request_id]
        if positions is not None:
            own = own[own.position.isin(positions)]
        events = self.events[self.events.request_id == request_id]
        table = self._hypotheses(self._held.of(self, request_id), own)
        return with_verdicts(table, own, events, self._prompt_lengths, self.token_texts)

    def readings_of_rows(self, rows: Sequence[int], columns: Sequence[str]) -> pd.DataFrame:
        """Returns some columns of the lens readings of some rows, as `StoredRun.readings_of_rows`."""
        self._require_readings()
        return self._hypotheses(self._lines("row", rows), self.rows[self.rows.row.isin(rows)])[list(columns)]

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
            if len(found := self._lines("request_id", numbers.index.tolist())):
                yield self._hypotheses(found, rows[rows.request_id.isin(numbers.index)])

    def _lines(self, key: str, values: Sequence[int]) -> pa.Table:
        """Returns the stored readings of all parts whose column `key` holds one of `values`."""
        names = self.journal.names("readings")
        nothing = arrow_schema("readings").empty_table()
        return pa.concat_tables([nothing, *(self.lines(name, key, values) for name in names)])

    def _hypotheses(self, readings: pa.Table, rows: pd.DataFrame) -> pd.DataFrame:
        """Returns stored readings of these rows as `tables.hypotheses_table`."""
        own = readings.filter(pc.is_in(readings["row"], value_set=pa.array(rows.row.to_numpy())))
        return tables.hypotheses_table(tables.reading_columns(own), rows, self.meta["lens"], self.texts_of)

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token id."""
        return [self._texts[token_id] for token_id in token_ids]


class _HeldReadings:
    """Holds the stored readings of 8 requests, by file, so that no part is read twice for one of them. Serves every
    `GrowingRun` of one run."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_request: OrderedDict[int, dict[str, pa.Table]] = OrderedDict()

    def of(self, run: GrowingRun, request_id: int) -> pa.Table:
        """Returns the readings of a request in all parts of `run`."""
        names = run.journal.names("readings")
        with self._lock:
            held = self._by_request.pop(request_id, {})
            held |= {name: run.lines(name, "request_id", [request_id]) for name in names if name not in held}
            self._by_request[request_id] = held
            while len(self._by_request) > REQUESTS_IN_MEMORY:
                self._by_request.popitem(last=False)
            return pa.concat_tables([arrow_schema("readings").empty_table(), *(held[name] for name in names)])


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
