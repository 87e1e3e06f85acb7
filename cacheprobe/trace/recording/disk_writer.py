"""Writes a run to disk while it goes on: the recorder's rows, states and readings, part by part, with a journal.

A part is written if the recorder holds `part_bytes`, or after a time that grows with the run. It is named in the
journal at the end of a round of the main loop only: then every admitted request has read its prompt, so that a run can
be continued there. `trace/stored.py` reads the parts.

The files and the journal are written in the background, in their order. A recorder that holds `part_bytes` waits until
the earlier files are on the disk.
"""

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event

import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from cacheprobe.core.records import Finished, Observer, Request, StepRecord
from cacheprobe.core.values import JsonDict
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.journal import Journal, append_part, begin_journal, cut_journal, read_journal
from cacheprobe.trace.places import Recording, free_beside, recording, saying_why
from cacheprobe.trace.recording.assemble import meta_after
from cacheprobe.trace.recording.background import Background
from cacheprobe.trace.recording.lens_reader import Queued
from cacheprobe.trace.recording.recorder import Recorder, Source
from cacheprobe.trace.recording.restore import restore_recorder
from cacheprobe.trace.recording.stored_states import read_now
from cacheprobe.trace.state_store import tensor_key
from cacheprobe.trace.storage import RunFiles, request_record, write_trace
from cacheprobe.trace.stored import GrowingRun
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.thoughts import first_logits, thought_lines, thought_states
from cacheprobe.trace.trace import Trace, load_trace, trace_of

PART_BYTES = 2**26
"""Most bytes that the recorder holds before a part is written, by default: 64 MiB."""
SECONDS, _SHARE = 2.0, 0.01
"""A part is written after this many seconds, or after this share of the run's time if that is longer: a run of hours
has some hundred parts."""
_COPIES = 3
"""Parts in memory at most: one that is recorded, and one that is written, as it was recorded and joined."""


def part_bytes_of(budget: int) -> int:
    """Returns the number of bytes that a recorder may hold, for a memory budget in bytes of recorder and writer."""
    return max(min(PART_BYTES, budget // _COPIES), 1)


class DiskWriter(Observer):
    """Writes one run, or an import, part by part. Must receive the events of the run after its recorder."""

    recorder: Source
    requests: Sequence[Request]
    finished_in: Path | None = None
    """Directory of the finished run; None before."""

    def __init__(
        self,
        place: Recording,
        part_bytes: int,
        background: Background,
        journal: Journal | None = None,
        stop: Event | None = None,
    ) -> None:
        """Prepares a writer into the directory of `place`, whose run begins with `begin` or `begin_new`.

        part_bytes: see `part_bytes_of`.  background: runs the writer's jobs alone.  journal: of the part of the run
        that is there already.  stop: set if Ctrl-C stopped the run; None for a run that Ctrl-C does not stop.
        """
        self.place, self.part_bytes, self._background = place, part_bytes, background
        self._journal, self._stop = journal, stop
        self._files = RunFiles.of(place)
        """Used by the background's jobs alone."""
        self._is_due = self._is_late = False
        """Whether there are files that the journal does not name yet, and whether the recorder was full again since."""
        self._labelled: list[list[object]] = []
        self._committed: dict[int, list[int]] = {}
        self._finished: dict[int, Finished] = {}
        self._new_tokens: set[int] = set()
        self._began = self._last = time.monotonic()

    # -- from the first pass to the manifest

    def begin(
        self, recorder: Recorder, requests: Sequence[Request], states: Sequence[SequenceState], meta: JsonDict
    ) -> None:
        """Begins to write a run, or to go on where its journal ends.

        meta: metadata of the run that is known before its first pass.  states: of all requests, restored if it goes on.
        """
        journal = self._journal
        if journal is None:
            sites, heads = list(recorder.config.state_sites), list(recorder.config.heads)
            layers = sorted(recorder.layers) if sites or heads else []
            self.begin_new(recorder, requests, meta, {"sites": sites, "heads": heads, "layers": layers})
            return
        with saying_why(self.place.directory):
            cut_journal(journal)
            named = {*journal.files.sizes, journal.waiting["name"] if journal.waiting else ""}
            for path in journal.directory.glob(f"*-{journal.run_id}-*"):
                if path.name not in named:  # a kill came before the journal's line was written
                    path.unlink()
        restore_recorder(recorder, states, journal)
        self._go_on(recorder, requests, journal)

    def begin_new(
        self, source: Source, requests: Sequence[Request], meta: JsonDict, sites: Mapping[str, Sequence[object]]
    ) -> None:
        """Begins the journal of a run or of an import.

        meta: metadata that is known before the first pass.  sites: the lists `sites`, `heads` and `layers`.
        """
        directory = self.place.directory
        records = [request_record(request) for request in requests]
        started = [request.request_id for request in requests if request.cached is not None]
        content = {"run_id": self.place.run_id, "requests": records, "meta": meta, "from_snapshots": started}
        with saying_why(directory):
            begin_journal(directory, {**content, **sites})
        self._go_on(source, requests, _journal_in(directory))

    def _go_on(self, source: Source, requests: Sequence[Request], journal: Journal) -> None:
        """Takes what the journal has so far."""
        self.recorder, self.requests = source, requests
        self._number = journal.next_number
        self._tokens, self._texts = journal.tokens, journal.texts
        self._num_masses = len(source.answer_mass)
        self._seen_tokens = set(journal.token_texts)
        self._has_states = bool(journal.files.names("states", "safetensors"))
        self.step = journal.last_step
        """Number of the newest step, which the next line of the journal names."""
        self._waiting = journal.waiting["name"] if journal.waiting else None
        """Name of the file of waiting rows that the newest line of the journal names; None without one."""

    def trace(self, states: Sequence[SequenceState], before: JsonDict, meta: JsonDict) -> Trace:
        """Finishes a run, and returns its Trace, whose states are read at their first use.

        before: from `meta_before`.  meta: the run's "errors" and "missing".
        Twin: `assemble.assemble`, ==: the tables have the same lines, and the states the same bits.
        """
        recorder = self.recorder
        assert isinstance(recorder, Recorder)
        if recorder.reader is not None:
            recorder.reader.require_ended()
        self.end_round(states, is_last=True)
        self.wait()
        journal = _journal_in(self.place.directory)
        has_readings = bool(journal.files.names("readings"))
        after = meta_after(recorder, self.requests, journal.texts, has_readings, meta)
        thinking = before["thinking"] if journal.files.names("thoughts") else None
        trace = load_trace(self.finish({**before, "thinking": thinking, **after}), recorder.model)
        trace.reading_later = read_now if trace.is_unread else None
        return trace

    def finish(self, meta: JsonDict) -> Path:
        """Writes one table of each kind, and the manifest; returns the directory of the run. Call it after `wait`.
        meta: of the whole run.

        If Ctrl-C stopped a run that was to replace a finished one, the finished run stays, and the stopped one gets a
        directory beside it; see `places.free_beside`.
        """
        run, place = GrowingRun(_journal_in(self.place.directory)), self.place
        trace = trace_of(run, None)
        trace.meta = meta

        def finish_in(where: Recording) -> None:
            """Writes the whole run, and deletes what it does not need."""
            pieces = run.reading_pieces()
            where.finish(lambda: write_trace(trace, RunFiles.of(where), pieces, keeps_shards=True))

        if self._stop is not None and self._stop.is_set() and place.replaces_a_run:
            self.finished_in = free_beside(place.directory)
            with recording(self.finished_in, place.run_id, is_kept=False) as beside:
                finish_in(beside)
            place.drop()
        else:
            finish_in(place)
            self.finished_in = place.directory
        return self.finished_in

    # -- events

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Keeps committed tokens for the journal."""
        self._committed.setdefault(request_id, []).extend(token_ids)
        self._tokens[request_id].extend(token_ids)

    def on_finish(self, finished: Finished) -> None:
        """Keeps how a request ended for the journal."""
        self._finished[finished.request_id] = finished

    def on_step(self, record: StepRecord) -> None:
        """Writes the files of a part if the recorder holds as much as it may."""
        self.step = record.step
        if self.recorder.num_bytes >= self.part_bytes:
            self._is_late = self._is_due
            self._write()
            self._is_due = True

    def end_round(self, states: Sequence[SequenceState], *, is_last: bool = False) -> None:
        """Names the written files in the journal, with what the recorder holds now, if a part is due and the earlier
        files are on the disk. If the disk is slower than the run, waits for it.

        states: of all requests.  is_last: in any case.
        Raises: as `wait`, for files of an earlier part.
        """
        now = time.monotonic()
        is_due = self._is_due or now - self._last >= max(SECONDS, _SHARE * (now - self._began))
        if not is_last and not (is_due and (self._is_late or self._background.is_idle)):
            return
        self._write()
        earlier, part = self._waiting, self._part({str(s.request_id): s.error for s in states if s.error})
        waiting = self._take_waiting()
        name = self._waiting
        self._in_background(lambda: self._append(part, name, waiting, earlier))
        self._last = time.monotonic()
        self._labelled, self._committed, self._finished = [], {}, {}
        self._is_due = self._is_late = False
        self._seen_tokens |= self._new_tokens
        self._new_tokens = set()

    def wait(self) -> None:
        """Waits until the files and the journal are on the disk. Raises: TraceError for an error of the file system,
        such as a full disk; the parts in the journal stay."""
        self._background.wait()

    # -- files

    def _in_background(self, job: Callable[[], object]) -> None:
        """Lets the background run a job, whose errors of the file system become TraceErrors."""
        directory, kept = self.place.directory, self._kept

        def run() -> None:
            with saying_why(directory, kept):
                job()

        self._background.add(run)

    def _write(self) -> None:
        """Takes what the recorder holds, and lets it be written as files that the journal does not name yet."""
        self.wait()
        part, texts_of = self.recorder.take(), self.recorder.texts.token_texts
        self._labelled += [[row.row, row.role, row.status, row.state_index] for row in part.labelled]
        written: dict[str, pd.DataFrame | pa.Table] = {**tables.part_tables(part, self._committed, texts_of)}
        self._new_tokens |= {*written.pop("tokens")["token_id"].tolist()} - self._seen_tokens
        if part.features is not None:
            written["features"] = part.features
        if part.columns:
            written["readings"] = tables.readings_table(part.columns)
        for kind, table in written.items():
            if len(table):
                self._write_table(kind, table, kind)
        if part.thoughts:
            assert self.recorder.model is not None
            lines = thought_lines(part.thoughts, self.requests, self.recorder.model)
            self._write_table("thoughts", lines, "thoughts of a part")
            logits = first_logits(part.thoughts)
            self._write_tensors("thoughts", {"states": thought_states(part.thoughts), "first_logits": logits})
        has_rows = any(len(states) for states in part.states.values())
        if has_rows or (part.states and not self._has_states):  # a run that keeps no row has a file of states too
            self._write_tensors("states", {tensor_key(*at): one.contiguous() for at, one in part.states.items()})
            self._has_states = True
        self._number += 1

    @property
    def _kept(self) -> str:
        """Says, in an error of the file system, what is left and how the run goes on."""
        command = f"`cacheprobe resume {self.place.directory}`"
        return f"its whole parts stay; when the fault is gone, {command} continues it, unless it is an import"

    def _write_table(self, kind: str, table: "pd.DataFrame | pa.Table", schema: str) -> None:
        name = f"{kind}-{self.place.run_id}-{self._number:05d}.parquet"
        self._in_background(lambda: self._files.write_table(name, [table], schema))

    def _write_tensors(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        name = f"{kind}-{self.place.run_id}-{self._number:05d}.safetensors"
        self._in_background(lambda: self._files.write_tensors(name, tensors))

    def _part(self, errors: Mapping[str, str]) -> JsonDict:
        """Returns the line of the journal for what was taken since the last one, without the checksums of its files and
        without waiting rows."""
        recorder, reader, new = self.recorder, self.recorder.reader, sorted(self._new_tokens)
        masses = dict(list(recorder.answer_mass.items())[self._num_masses :])
        self._num_masses = len(recorder.answer_mass)
        texts = {number: self._new_text(number) for number in self._committed}
        return {
            "step": self.step,
            "seconds": time.monotonic() - self._last,  # since the part before, or since this process began to record
            **recorder.so_far(),
            "next_number": self._number,
            "labelled": self._labelled,
            "committed": _by_text(self._committed),
            "texts": _by_text(texts),
            "token_texts": list(zip(new, recorder.texts.token_texts(new), strict=True)),
            "finish": _by_text({number: finished.reason for number, finished in self._finished.items()}),
            "errors": dict(errors),
            "answer_mass": _by_text(masses),
            "lens_errors": {} if reader is None else _by_text(reader.errors),
        }

    def _new_text(self, request_id: int) -> tuple[int, str]:
        """Returns (number of characters of the request's earlier text that stay, the text after them). A new token may
        change an incomplete character before it."""
        prompt = self.requests[request_id].prompt_token_ids
        earlier, now = self._texts[request_id], self.recorder.texts.decode(self._tokens[request_id], after=prompt)
        self._texts[request_id] = now
        pairs = () if now.startswith(earlier) else zip(earlier, now, strict=False)
        shorter = min(len(earlier), len(now))
        num_kept = next((i for i, (before, after) in enumerate(pairs) if before != after), shorter)
        return num_kept, now[num_kept:]

    def _take_waiting(self) -> dict[str, Tensor]:
        """Returns the rows that wait for their next token, as tensors of a file, which it names; {} without rows."""
        waiting: Sequence[Queued] = [] if self.recorder.reader is None else self.recorder.reader.waiting
        self._waiting = f"waiting-{self.place.run_id}-{self._number:05d}.safetensors" if waiting else None
        if not waiting:
            return {}
        return {
            "places": torch.tensor([[q.row, q.position, q.request_id, q.step, len(q.layers)] for q in waiting]),
            "states": torch.cat([q.states for q in waiting]).cpu(),
            "layers": torch.cat([q.layers for q in waiting]).cpu(),
        }

    def _append(self, part: JsonDict, name: str | None, waiting: Mapping[str, Tensor], earlier: str | None) -> None:
        """Appends a part to the journal, with the checksums of its files, which are on the disk.

        name: of the file of `waiting` rows, which is written first.  earlier: of that of the part before, which is
        deleted; None if there is none.
        """
        directory, line = self.place.directory, {**part, **self._files.checksums, "waiting": None}
        if name is not None:
            files = RunFiles.of(self.place)
            files.write_tensors(name, waiting)
            line["waiting"] = {"name": name, **files.checksums}
        append_part(directory, line)
        self._files.clear()
        if earlier is not None:
            (directory / earlier).unlink(missing_ok=True)
        _return_freed_memory()


def _return_freed_memory() -> None:
    """Gives freed memory back to the system. glibc keeps it otherwise, and a process grows by each part's tensors."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _by_text(values: Mapping[int, object]) -> JsonDict:
    """Returns the dict with request ids as texts, as JSON has them."""
    return {str(request_id): value for request_id, value in values.items()}


def _journal_in(directory: Path) -> Journal:
    journal = read_journal(directory)
    assert journal is not None
    return journal
