"""Reads a run that is being recorded to disk, or that was not finished, from its parts; and finishes it.

    run/
      journal.jsonl                     names the parts below: see journal.py
      states-<id>-00000.safetensors     states of one part; the finished run keeps these files
      readings-<id>-00000.safetensors   lens readings, one tensor for each column of `LensReader.take`
      features-<id>-00000.safetensors   features of a dictionary, as from `FeatureRecorder.take`
      rows-<id>-00000.parquet, events-<id>-00000.parquet, ledger-<id>-00000.parquet
      thoughts-<id>-00000.parquet and .safetensors  of a Thinking States model: chunk states, and the logits of the
                                        first word
      waiting-<id>-00000.safetensors    states of the rows that wait for their next token, of the newest part alone

A run is finished by one table of each kind in place of those of the parts, and a manifest (see storage.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cacheprobe.core.tokens import visible
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.checked_files import CheckedFiles
from cacheprobe.trace.manifest import JOURNAL, UNFINISHED
from cacheprobe.trace.parts.journal import Journal
from cacheprobe.trace.parts.shards import ShardStore, header_of, read_tensor
from cacheprobe.trace.run_files import ROW_GROUP, RunFiles, parquet_options, write_parquet
from cacheprobe.trace.storage import request_from_record
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.features import feature_table
from cacheprobe.trace.tables.schema import arrow_table, typed
from cacheprobe.trace.tables.thoughts import thoughts_table

UNDECIDED = "given_up"
"""Role and status of a row whose draft token has no verdict in the journal."""
_READINGS_AT_ONCE = 60_000
"""Number of lens readings that are in memory together while a run is finished."""


class GrowingRun:
    """Reads the parts of a run that its journal names."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.files = CheckedFiles(journal.directory, journal.checksums)
        self.token_texts: dict[int, str] = {
            token_id: text for part in journal.parts for token_id, text in part["token_texts"]
        }

    def table(self, kind: str, before: pd.DataFrame | None = None, since: int = 0) -> pd.DataFrame:
        """Returns the table of one kind, "rows", "events" or "ledger", joined over the parts.

        before: the table up to part number `since`; only later parts are then read.
        """
        names = [name for part in self.journal.parts[since:] for name in part["names"].get(kind, ())]
        if before is not None and not names:
            return before
        parts = [typed([], kind) if before is None else before]
        parts += [typed(self.files.table(name).to_pandas(), kind) for name in names]
        return pd.concat(parts, ignore_index=True)

    def rows(self, before: pd.DataFrame | None = None, since: int = 0) -> pd.DataFrame:
        """Returns the rows table, with what later parts gave to rows of earlier ones: role, status, and state_index,
        which a journal of version 1 does not repeat. before, since: as in `table`; `before` is unchanged."""
        rows = self.table("rows", before, since)
        names = ("role", "status", "state_index")
        rows = rows.assign(**{name: rows[name].to_numpy(copy=True) for name in names})
        labelled = [line for part in self.journal.parts[since:] for line in part["labelled"]]
        for i, name in enumerate(names, 1):
            values = {line[0]: line[i] for line in labelled if len(line) > i}
            rows.loc[list(values), name] = list(values.values())
        rows.loc[rows.role == "", ["role", "status"]] = UNDECIDED
        return rows

    def texts_of(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token id."""
        return [self.token_texts[token_id] for token_id in token_ids]

    def columns(self, rows: "pd.Series | None" = None) -> dict[str, Tensor]:
        """Returns the lens readings as columns, as from `LensReader.take`; {} if there are none.

        rows: numbers of the rows whose readings are returned; None for all.
        """
        parts = []
        for part in self._tensors("readings"):
            if rows is not None:
                chosen = torch.isin(part["row"], torch.tensor(rows.to_numpy()))
                part = {key: column[chosen] for key, column in part.items()}
            parts.append(part)
        columns = _joined(parts)
        return columns if columns and len(columns["row"]) else {}

    def features(self, rows: pd.DataFrame) -> pd.DataFrame | None:
        """Returns the table of recorded features, as from `tables.features.feature_table`; None if the run has no
        dictionary. rows: from `rows`."""
        capture = self.journal.header["meta"].get("capture", {})
        if capture.get("dictionary") is None:
            return None
        columns = _joined(list(self._tensors("features"))) or _NO_FEATURES
        return feature_table(columns, rows, capture["statuses"])

    def _tensors(self, kind: str) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of each file of one kind, by name."""
        for name in self.journal.names(kind):
            yield {key: read_tensor(self.files, name, entry) for key, entry in header_of(self.files, name).items()}

    def readings(self, rows: pd.DataFrame) -> Iterator[pd.DataFrame]:
        """Yields the table of lens readings in pieces that are sorted like the whole: requests in order. rows: from
        `rows`. Requests on which the lens failed have none."""
        failed = {int(request_id) for request_id in self.journal.gathered("lens_errors")}
        rows = rows[~rows.request_id.isin(failed)]
        layers = max(len(self.journal.header["layers"]), 1)
        counts = rows.groupby("request_id").size().mul(layers)
        for _, numbers in counts.groupby(counts.cumsum() // _READINGS_AT_ONCE):
            own = rows[rows.request_id.isin(numbers.index)]
            if columns := self.columns(own.row):
                lens = self.journal.header["meta"]["lens"]
                yield tables.hypotheses_table(columns, own, lens, self.texts_of)

    def thoughts(self, rows: pd.DataFrame) -> pd.DataFrame | None:
        """Returns the table of thoughts, as from `tables.thoughts.thoughts_table`; None without thoughts. rows: from
        `rows`."""
        names = self.journal.names("thoughts")
        parts: list[pd.DataFrame] = []
        # the logits of one part at a time
        for of_lines, of_tensors in zip(names[::2], names[1::2], strict=True):
            lines = self.files.table(of_lines).to_pandas()
            logits = read_tensor(self.files, of_tensors, header_of(self.files, of_tensors)["first_logits"])
            parts.append(thoughts_table(lines, logits, rows, self.journal.tokens))
        if not parts:
            return None
        table = pd.concat(parts, ignore_index=True)
        return table.assign(thought=range(len(table)))

    @property
    def thought_states(self) -> Tensor | None:
        """The chunk states [n, c, m] of n thoughts; None without thoughts."""
        names = self.journal.names("thoughts")[1::2]
        parts = [read_tensor(self.files, name, header_of(self.files, name)["states"]) for name in names]
        return torch.cat(parts) if parts else None

    @property
    def store(self) -> ShardStore:
        """The captured states of all parts."""
        header = self.journal.header
        shards = self.journal.names("states")
        return ShardStore(self.files, shards, header["sites"], header["layers"], header["heads"])

    @property
    def meta(self) -> JsonDict:
        """Metadata of the run so far, as in `Trace.meta`; "growing" says how many parts it has."""
        last = self.journal.parts[-1] if self.journal.parts else {}
        ends = {str(request["request_id"]): UNFINISHED for request in self.journal.header["requests"]}
        return {
            **self.journal.header["meta"],
            **{name: last[name] for name in ("checks", "preemptions", "self_checks") if name in last},
            "finish": ends | self.journal.gathered("finish"),
            "errors": self.journal.gathered("errors"),
            "growing": {"parts": len(self.journal.parts)},
        }

    @property
    def texts(self) -> dict[int, str]:
        """Text of each request so far."""
        texts = dict.fromkeys((request["request_id"] for request in self.journal.header["requests"]), "")
        for part in self.journal.parts:
            for request_id, (num_kept, added) in part["texts"].items():
                texts[int(request_id)] = texts[int(request_id)][:num_kept] + added
        return texts

    @property
    def token_table(self) -> pd.DataFrame:
        """The tokens table, as from `tables.tokens_table`."""
        return typed(
            [(token_id, visible(self.token_texts[token_id])) for token_id in sorted(self.token_texts)], "tokens"
        )

    def fields(self, model: CachedLM | None) -> JsonDict:
        """Returns the fields of the run so far as a dict by name: the keyword arguments of `Trace`."""
        rows = self.rows()

        def read() -> pd.DataFrame | None:
            """Returns the lens readings; None if there are none."""
            readings = list(self.readings(rows))
            return pd.concat(readings, ignore_index=True) if readings else None

        return dict(
            requests=tuple(request_from_record(item) for item in self.journal.header["requests"]),
            tokens=self.journal.tokens,
            texts=self.texts,
            row_table=rows,
            stored_readings=None,
            readings_on_disk=read,
            event_table=self.table("events"),
            ledger_table=self.table("ledger"),
            token_table=self.token_table,
            thought_table=self.thoughts(rows),
            feature_table=self.features(rows),
            thought_states=self.thought_states,
            store=self.store,
            meta=self.meta,
            model=model,
        )

    def finish(self, files: RunFiles, meta: JsonDict) -> list[str]:
        """Writes one table of each kind and the manifest, which makes the directory a finished run. Returns the names
        of the files that the finished run no longer needs, the journal last.

        files: of the same directory and run.  meta: of the whole run.
        """
        rows, run_id = self.rows(), files.run_id
        written = {
            "rows": rows,
            "events": self.table("events"),
            "ledger": self.table("ledger"),
            "tokens": self.token_table,
            **({} if (features := self.features(rows)) is None else {"features": features}),
        }
        for name, table in written.items():
            files.write(f"{name}-{run_id}.parquet", lambda path, t=table, of=name: write_parquet(t, path, of))
        if (states := self.thought_states) is not None:
            thoughts = self.thoughts(rows)
            files.write(f"thoughts-{run_id}.parquet", lambda path: write_parquet(thoughts, path, "thoughts"))
            files.write_tensors(f"thoughts-{run_id}.safetensors", {"states": states})
        pieces = self.readings(rows)
        if (first := next(pieces, None)) is not None:
            files.write(f"hypotheses-{run_id}.parquet", lambda path: _write_pieces(path, chain([first], pieces)))
        sums, shards = self.journal.checksums, self.journal.names("states")
        for of_files, kept in files.checksums.items():
            kept |= {name: sums[of_files][name] for name in shards}
        tokens, texts = self.journal.tokens, self.texts
        requests = [
            {**request, "committed_token_ids": tokens[request["request_id"]], "text": texts[request["request_id"]]}
            for request in self.journal.header["requests"]
        ]
        sites = {name: self.journal.header[name] for name in ("sites", "heads", "layers")}
        files.write_manifest(shards, sites, requests, meta)
        return [*(name for name in sums["files"] if name not in files.sizes), JOURNAL]


_NO_FEATURES = {
    "row": torch.zeros(0, dtype=torch.int64),
    "feature": torch.zeros(0, 1, dtype=torch.int64),
    "activation": torch.zeros(0, 1),
    "copies": torch.zeros(0, 2, dtype=torch.int64),
}
"""Columns of features without a line."""


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the columns of several parts as one; {} without a part."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else {}


def _write_pieces(path: Path, pieces: Iterable[pd.DataFrame]) -> None:
    """Writes pieces of the table of lens readings, one after the other, as one Parquet file."""
    schema = arrow_table(typed([], "hypotheses"), "hypotheses").schema
    with pq.ParquetWriter(path, schema, **parquet_options(schema)) as writer:
        for piece in pieces:
            writer.write_table(arrow_table(piece, "hypotheses"), row_group_size=ROW_GROUP)
