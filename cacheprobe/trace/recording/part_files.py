"""Writes what one recorder of a run holds as the files of a part: the recorder of the model, or of a drafter's head."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from cacheprobe.core.records import Request
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.journal import Journal
from cacheprobe.trace.recording.lens_reader import Queued
from cacheprobe.trace.recording.recorder import Source
from cacheprobe.trace.state_store import tensor_key
from cacheprobe.trace.storage import RunFiles
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.thoughts import first_logits, thought_lines, thought_states


class PartFiles:
    """Takes what a recorder holds, lets it be written in the background, and gives the journal's entries on it."""

    waiting: str | None
    """Name of the file of waiting rows that the newest line of the journal names; None without one."""

    def __init__(
        self, source: Source, files: RunFiles, journal: Journal, in_background: Callable[[Callable[[], object]], object]
    ) -> None:
        """Goes on after the newest part of the journal. files: used by jobs of the background alone.  in_background:
        adds a job to the background."""
        self.source, self._files, self._in_background = source, files, in_background
        self._num_masses = len(source.answer_mass)
        self._seen_tokens, self._new_tokens = set(journal.token_texts), set[int]()
        self._has_states = bool(journal.files.names("states", "safetensors"))
        self.waiting = journal.waiting["name"] if journal.waiting else None
        self._labelled: list[list[object]] = []

    def write(self, number: int, committed: Mapping[int, Sequence[int]], requests: Sequence[Request]) -> None:
        """Takes what the recorder holds, and lets it be written as files that the journal does not name yet.

        number: in the names of the files.  committed: tokens of the part, by request.
        """
        part, texts_of = self.source.take(), self.source.texts.token_texts
        self._labelled += [[row.row, row.role, row.status, row.state_index] for row in part.labelled]
        written: dict[str, pd.DataFrame | pa.Table] = {**tables.part_tables(part, committed, texts_of)}
        self._new_tokens |= {*written.pop("tokens")["token_id"].tolist()} - self._seen_tokens
        if part.features is not None:
            written["features"] = part.features
        if part.columns:
            written["readings"] = tables.readings_table(part.columns)
        for kind, table in written.items():
            if len(table):
                self._write_table(kind, number, table, kind)
        if part.thoughts:
            assert self.source.model is not None
            lines = thought_lines(part.thoughts, requests, self.source.model)
            self._write_table("thoughts", number, lines, "thoughts of a part")
            logits = first_logits(part.thoughts)
            self._write_tensors("thoughts", number, {"states": thought_states(part.thoughts), "first_logits": logits})
        has_rows = any(len(states) for states in part.states.values())
        if has_rows or (part.states and not self._has_states):  # a run that keeps no row has a file of states too
            self._write_tensors(
                "states", number, {tensor_key(*at): one.contiguous() for at, one in part.states.items()}
            )
            self._has_states = True

    def _write_table(self, kind: str, number: int, table: "pd.DataFrame | pa.Table", schema: str) -> None:
        name = self._files.name(kind, number=number)
        self._in_background(lambda: self._files.write_table(name, [table], schema))

    def _write_tensors(self, kind: str, number: int, tensors: Mapping[str, Tensor]) -> None:
        name = self._files.name(kind, "safetensors", number)
        self._in_background(lambda: self._files.write_tensors(name, tensors))

    def end_part(self, number: int) -> Callable[[], JsonDict]:
        """Ends a part, after `write`. Returns a job for the background: it writes the rows that wait for their next
        token, and returns what the journal's line says of the recorder. number: in the name of their file."""
        source, reader, new = self.source, self.source.reader, sorted(self._new_tokens)
        masses = dict(list(source.answer_mass.items())[self._num_masses :])
        entries = {
            **source.so_far(),
            "labelled": self._labelled,
            "token_texts": list(zip(new, source.texts.token_texts(new), strict=True)),
            "answer_mass": by_text(masses),
            "lens_errors": {} if reader is None else by_text(reader.errors),
            "waiting": None,
        }
        tensors = self._waiting_rows()
        name = self.waiting = self._files.name("waiting", "safetensors", number) if tensors else None
        self._num_masses = len(source.answer_mass)
        self._seen_tokens |= self._new_tokens
        self._labelled, self._new_tokens = [], set()

        def finish() -> JsonDict:
            """Writes the waiting rows, and returns the entries."""
            if name is None:
                return entries
            files = RunFiles(self._files.directory, self._files.staging, self._files.run_id)
            files.write_tensors(name, tensors)
            return {**entries, "waiting": {"name": name, **files.checksums}}

        return finish

    def _waiting_rows(self) -> dict[str, Tensor]:
        """Returns the rows that wait for their next token, as tensors of a file; {} without rows."""
        waiting: Sequence[Queued] = [] if self.source.reader is None else self.source.reader.waiting
        if not waiting:
            return {}
        return {
            "places": torch.tensor([[q.row, q.position, q.request_id, q.step, len(q.layers)] for q in waiting]),
            "states": torch.cat([q.states for q in waiting]).cpu(),
            "layers": torch.cat([q.layers for q in waiting]).cpu(),
        }


def by_text(values: Mapping[int, object]) -> JsonDict:
    """Returns the dict with request ids as texts, as JSON has them."""
    return {str(request_id): value for request_id, value in values.items()}
