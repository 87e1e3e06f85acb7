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

from cacheprobe.core.records import Finished, Observer, Request, StepRecord
from cacheprobe.core.values import JsonDict
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.journal import Journal, append_part, begin_journal, cut_journal, read_journal
from cacheprobe.trace.places import Recording, free_beside, recording, saying_why
from cacheprobe.trace.recording.assemble import meta_after
from cacheprobe.trace.recording.background import Background
from cacheprobe.trace.recording.part_files import PartFiles, by_text
from cacheprobe.trace.recording.recorder import Recorder, Source
from cacheprobe.trace.recording.restore import restore_recorder
from cacheprobe.trace.recording.stored_states import read_now
from cacheprobe.trace.storage import SITES, RunFiles, request_record, write_trace
from cacheprobe.trace.stored import GrowingRun
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
        self._committed: dict[int, list[int]] = {}
        self._finished: dict[int, Finished] = {}
        self._began = self._last = time.monotonic()

    # -- from the first pass to the manifest

    def begin(
        self,
        requests: Sequence[Request],
        states: Sequence[SequenceState],
        recorded: Sequence[tuple[Recorder, JsonDict]],
    ) -> None:
        """Begins to write a run, or to go on where its journal ends.

        states: of all requests, restored if it goes on.  recorded: the run's recorder, and the metadata that is known
        before the first pass; then those of the drafter's head, if it has one.
        """
        journal, (recorder, meta) = self._journal, recorded[0]
        if journal is None:
            of_heads = [{**_sites(one), "meta": its_meta} for one, its_meta in recorded[1:]]
            about = {**_sites(recorder), **({"head": of_heads[0]} if of_heads else {})}
            self.begin_new([one for one, _ in recorded], requests, meta, about)
            return
        journals = _with_head(journal)
        with saying_why(self.place.directory):
            cut_journal(journal)
            named = {*journal.files.sizes, *(one.waiting["name"] for one in journals if one.waiting)}
            for path in journal.directory.glob(f"*-{journal.run_id}-*"):
                if path.name not in named:  # a kill came before the journal's line was written
                    path.unlink()
        for (one, _), its_journal in zip(recorded, journals, strict=True):
            restore_recorder(one, states, its_journal)
        self._go_on([one for one, _ in recorded], requests, journal)

    def begin_new(
        self, sources: Sequence[Source], requests: Sequence[Request], meta: JsonDict, about: JsonDict
    ) -> None:
        """Begins the journal of a run or of an import.

        sources: the recorder, and that of the drafter's head, if there is one.  meta: metadata that is known before the
        first pass.  about: the lists `sites`, `heads` and `layers`; "head" has those and the metadata of the head.
        """
        directory = self.place.directory
        records = [request_record(request) for request in requests]
        started = [request.request_id for request in requests if request.cached is not None]
        content = {"run_id": self.place.run_id, "requests": records, "meta": meta, "from_snapshots": started}
        with saying_why(directory):
            begin_journal(directory, {**content, **about})
        self._go_on(sources, requests, _journal_in(directory))

    def _go_on(self, sources: Sequence[Source], requests: Sequence[Request], journal: Journal) -> None:
        """Takes what the journal has so far."""
        self.recorder, self.requests = sources[0], requests
        self._number = journal.next_number
        self._tokens, self._texts = journal.tokens, journal.texts
        own = zip(sources, (self._files, self._files.of_head()), _with_head(journal), strict=False)
        self._parts = [PartFiles(source, files, one, self._in_background) for source, files, one in own]
        self.step = journal.last_step
        """Number of the newest step, which the next line of the journal names."""

    def trace(self, states: Sequence[SequenceState], recorded: Sequence[tuple[JsonDict, JsonDict]]) -> Trace:
        """Finishes a run, and returns its Trace, whose states are read at their first use.

        recorded: what `meta_before` gives, and the "errors" and "missing": of the run; then of the drafter's head, if
        it has one.
        Twin: `assemble.assemble`, ==: the tables have the same lines, and the states the same bits.
        """
        recorders = [part.source for part in self._parts if isinstance(part.source, Recorder)]
        for recorder in recorders:
            if recorder.reader is not None:
                recorder.reader.require_ended()
        self.end_round(states, is_last=True)
        self.wait()
        metas = []
        journals = _with_head(_journal_in(self.place.directory))
        for recorder, one, (before, meta) in zip(recorders, journals, recorded, strict=True):
            after = meta_after(recorder, self.requests, one.texts, bool(one.files.names("readings")), meta)
            thinking = before["thinking"] if one.files.names("thoughts") else None
            metas.append({**before, "thinking": thinking, **after})
        trace = load_trace(self.finish(*metas), recorders[0].model)
        trace.reading_later = read_now if trace.is_unread else None
        return trace

    def finish(self, meta: JsonDict, of_head: JsonDict | None = None) -> Path:
        """Writes one table of each kind, and the manifest; returns the directory of the run. Call it after `wait`.
        meta: of the whole run.  of_head: of the drafter's head.

        If Ctrl-C stopped a run that was to replace a finished one, the finished run stays, and the stopped one gets a
        directory beside it; see `places.free_beside`.
        """
        run, place = GrowingRun(_journal_in(self.place.directory)), self.place
        trace = trace_of(run, None)
        trace.meta = meta
        if trace.head is not None and of_head is not None:
            trace.head.meta = of_head

        def finish_in(where: Recording) -> None:
            """Writes the whole run, and deletes what it does not need."""
            pieces = [one.reading_pieces() for one in (run, run.head) if one is not None]
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
        if sum(part.source.num_bytes for part in self._parts) >= self.part_bytes:
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
        line = self._line({str(s.request_id): s.error for s in states if s.error})
        earlier = [part.waiting for part in self._parts]
        jobs = [part.end_part(self._number) for part in self._parts]
        self._in_background(lambda: self._append(line, jobs, earlier))
        self._last = time.monotonic()
        self._committed, self._finished = {}, {}
        self._is_due = self._is_late = False

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
        """Takes what the recorders hold, and lets it be written as files that the journal does not name yet."""
        self.wait()
        for part in self._parts:
            part.write(self._number, self._committed, self.requests)
        self._number += 1

    @property
    def _kept(self) -> str:
        """Says, in an error of the file system, what is left and how the run goes on."""
        command = f"`cacheprobe resume {self.place.directory}`"
        return f"its whole parts stay; when the fault is gone, {command} continues it, unless it is an import"

    def _line(self, errors: Mapping[str, str]) -> JsonDict:
        """Returns the line of the journal for what was done since the last one, without what it says of the recorders
        and of their files."""
        texts = {number: self._new_text(number) for number in self._committed}
        return {
            "step": self.step,
            "seconds": time.monotonic() - self._last,  # since the part before, or since this process began to record
            "next_number": self._number,
            "committed": by_text(self._committed),
            "texts": by_text(texts),
            "finish": by_text({number: finished.reason for number, finished in self._finished.items()}),
            "errors": dict(errors),
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

    def _append(self, line: JsonDict, jobs: Sequence[Callable[[], JsonDict]], earlier: Sequence[str | None]) -> None:
        """Appends a part to the journal, with the checksums of its files, which are on the disk.

        jobs: of `PartFiles.end_part`, whose entries the line gets.  earlier: names of the files of waiting rows of the
        part before, which are deleted.
        """
        directory, (own, *of_head) = self.place.directory, [job() for job in jobs]
        head = {"head": of_head[0]} if of_head else {}
        append_part(directory, {**line, **own, **head, **self._files.checksums})
        self._files.clear()
        for name in earlier:
            if name is not None:
                (directory / name).unlink(missing_ok=True)
        _return_freed_memory()


def _sites(recorder: Recorder) -> JsonDict:
    """Returns the lists of the recorder's sites of states, heads and layers, and the layer of each module."""
    sites, heads = list(recorder.config.state_sites), list(recorder.config.heads)
    layers = sorted(recorder.layers) if sites or heads else []
    return {**dict(zip(SITES, (sites, heads, layers), strict=True)), "modules": recorder.kept.modules}


def _return_freed_memory() -> None:
    """Gives freed memory back to the system. glibc keeps it otherwise, and a process grows by each part's tensors."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _with_head(journal: Journal) -> list[Journal]:
    """Returns the journal, and what it says of the drafter's head if there is one."""
    return [journal] if journal.head is None else [journal, journal.head]


def _journal_in(directory: Path) -> Journal:
    journal = read_journal(directory)
    assert journal is not None
    return journal
