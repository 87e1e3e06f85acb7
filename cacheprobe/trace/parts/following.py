"""Reads the tables of a run that is being recorded to disk, and reads on part by part while it grows."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.checked_files import CheckedFiles
from cacheprobe.trace.manifest import JOURNAL, TraceError
from cacheprobe.trace.parts.growing import GrowingRun
from cacheprobe.trace.parts.journal import Journal, read_journal, read_on
from cacheprobe.trace.parts.shards import header_of, read_tensor
from cacheprobe.trace.stored import REQUESTS_IN_MEMORY, StoredRun
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.draft_verdicts import with_verdicts
from cacheprobe.trace.tables.recorded_features import recorded_lines


class FollowedRun(StoredRun):
    """Reads the tables of a run that is being recorded, or was not finished, up to its newest part. Does not change:
    `read_on` returns another object.

    Raises: TraceError, when created, for a directory without such a run, or with a damaged one.
    Twin: `load_trace(directory)`, whose tables hold the same lines, ==.
    """

    def __init__(self, directory: "str | Path") -> None:
        journal = read_journal(Path(directory))
        if journal is None:
            raise TraceError(f"{directory} has no {JOURNAL}; give the directory that a run is recorded in")
        self._open(journal, None)

    def _open(self, journal: Journal, before: "FollowedRun | None") -> None:
        """Sets the fields. before: the run up to an earlier part of the journal."""
        self.directory, self.journal = journal.directory, journal
        growing, header = GrowingRun(journal), journal.header
        self.meta: JsonDict = growing.meta
        tokens, texts = journal.tokens, growing.texts
        self.requests = [
            {**request, "committed_token_ids": tokens[request["request_id"]], "text": texts[request["request_id"]]}
            for request in header["requests"]
        ]
        self.sites, self.layers = tuple(header["sites"]), tuple(header["layers"])
        self._readings = _PartReadings() if before is None else before._readings
        since = len(before.journal.parts) if before is not None else 0
        self.rows = growing.rows(before and before.rows, since)
        self.events = growing.table("events", before and before.events, since)
        self.ledger = growing.table("ledger", before and before.ledger, since)
        self._texts = growing.token_texts

    def read_on(self) -> "FollowedRun | None":
        """Returns the run with the parts that were written since; itself if there are none. Reads the new parts alone.
        Returns None if the directory holds another run, or none. Raises: TraceError for a damaged part."""
        journal = read_on(self.journal)
        if journal is None or journal is self.journal:
            return None if journal is None else self
        run = FollowedRun.__new__(FollowedRun)
        run._open(journal, self)
        return run

    @cached_property
    def features(self) -> pd.DataFrame | None:
        """Features of a dictionary so far, as `StoredRun.features`; None for a run without."""
        found = GrowingRun(self.journal).features(self.rows)
        return None if found is None else recorded_lines(self.rows, found, self.meta["capture"]["dictionary"])

    @cached_property
    def thoughts(self) -> pd.DataFrame | None:
        """Thoughts table of the run so far; None without thoughts."""
        return GrowingRun(self.journal).thoughts(self.rows)

    @property
    def run_id(self) -> str:
        """Id of the run, which its file names hold."""
        return self.journal.run_id

    @property
    def version(self) -> str:
        """Names what was read: the run's id and its number of parts."""
        return f"{self.run_id}-{len(self.journal.parts)}"

    @property
    def has_readings(self) -> bool:
        """True if the run records lens readings."""
        return "Z" in self.meta["capture"]["sites"] and not self.is_unread

    @cached_property
    def token_texts(self) -> dict[int, str]:
        """Dict from token id to text (signs such as ␣ for white space), for every token so far."""
        return {token_id: visible(text) for token_id, text in self._texts.items()}

    def readings(self, request_id: int, positions: range | None = None) -> pd.DataFrame:
        """Returns the lens readings of one request so far, as `StoredRun.readings`; a row whose next token is open has
        none yet."""
        self._require_readings()
        own = self.rows[self.rows.request_id == request_id]
        if positions is not None:
            own = own[own.position.isin(positions)]
        columns = self._readings.of(self, request_id, own.row.to_numpy())
        table = tables.hypotheses_table(columns, own, self.meta["lens"], self._texts_of)
        events = self.events[self.events.request_id == request_id]
        return with_verdicts(table, own, events, self._prompt_lengths, self.token_texts)

    def readings_of_rows(self, rows: Sequence[int], columns: Sequence[str]) -> pd.DataFrame:
        """Returns some columns of the lens readings of some rows, as `StoredRun.readings_of_rows`."""
        self._require_readings()
        own = self.rows[self.rows.row.isin(rows)]
        found = self._readings.of_rows(self, own.row.to_numpy())
        return tables.hypotheses_table(found, own, self.meta["lens"], self._texts_of)[list(columns)]

    def _texts_of(self, token_ids: Sequence[int]) -> list[str]:
        return [self._texts[token_id] for token_id in token_ids]


class _PartReadings:
    """Reads the lens readings of one request from the parts of a run. Holds those of 8 requests, and reads no part
    twice for one of them. Serves every `FollowedRun` of one run."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests_in: list[set[int]] = []
        """Requests that have readings in each file, for the files looked into so far."""
        self._rows_in: list[tuple[int, int]] = []
        """Smallest and largest row number in each of these files."""
        self._held: OrderedDict[int, tuple[int, list[dict[str, Tensor]]]] = OrderedDict()
        """By request: number of files read, and the request's readings in each."""

    def of(self, run: FollowedRun, request_id: int, rows: np.ndarray) -> dict[str, Tensor]:
        """Returns the columns, as from `LensReader.take`, of readings of these rows of a request."""
        names, files = run.journal.names("readings"), CheckedFiles(run.directory, run.journal.checksums)
        owners = run.rows.request_id.to_numpy()
        with self._lock:
            self._look_into(names, files, owners)
            count, pieces = self._held.pop(request_id, (0, []))
            for number in range(count, len(names)):
                if request_id in self._requests_in[number]:
                    entries = header_of(files, names[number])
                    part = {key: read_tensor(files, names[number], entry) for key, entry in entries.items()}
                    chosen = torch.tensor(owners[part["row"].numpy()] == request_id)
                    pieces.append({key: column[chosen] for key, column in part.items()})
            self._held[request_id] = max(count, len(names)), pieces
            while len(self._held) > REQUESTS_IN_MEMORY:
                self._held.popitem(last=False)
            parts = list(pieces)
        if not parts:
            return dict(_NO_READINGS)
        columns = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        chosen = torch.isin(columns["row"], torch.tensor(rows))
        return {key: column[chosen] for key, column in columns.items()}

    def of_rows(self, run: FollowedRun, rows: np.ndarray) -> dict[str, Tensor]:
        """Returns the columns, as from `LensReader.take`, of readings of these rows of any requests. Reads the files
        that can hold one of them, and keeps nothing."""
        names, files = run.journal.names("readings"), CheckedFiles(run.directory, run.journal.checksums)
        wanted = torch.tensor(rows)
        with self._lock:
            self._look_into(names, files, run.rows.request_id.to_numpy())
            bounds = self._rows_in[: len(names)]
        parts = []
        for name, (low, high) in zip(names, bounds, strict=True):
            if ((wanted >= low) & (wanted <= high)).any():
                part = {key: read_tensor(files, name, entry) for key, entry in header_of(files, name).items()}
                chosen = torch.isin(part["row"], wanted)
                parts.append({key: column[chosen] for key, column in part.items()})
        if not parts:
            return dict(_NO_READINGS)
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _look_into(self, names: Sequence[str], files: CheckedFiles, owners: np.ndarray) -> None:
        """Notes the requests and the rows of each new file. owners: request of each row."""
        for name in names[len(self._requests_in) :]:
            row = read_tensor(files, name, header_of(files, name)["row"]).numpy()
            self._requests_in.append({*np.unique(owners[row]).tolist()})
            self._rows_in.append((int(row.min()), int(row.max())) if len(row) else (0, -1))


_NO_READINGS = {
    **{name: torch.zeros(0, dtype=torch.int64) for name in ("row", "layer", "target", "target_rank")},
    "top_token_ids": torch.zeros(0, 1, dtype=torch.int64),
    "top_logprob_nats": torch.zeros(0, 1),
    **{name: torch.zeros(0) for name in ("entropy_nats", "target_logprob_nats")},
}
"""Columns of readings without a line."""
