"""Records a run to disk from its first pass to its manifest, or goes on with one that was not finished."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.records import Request
from cacheprobe.core.values import JsonDict, folder, num_bytes
from cacheprobe.engine.sizes import available_bytes
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.parts.background import Background
from cacheprobe.trace.parts.growing import GrowingRun
from cacheprobe.trace.parts.journal import Journal, begin_journal, cut_journal, read_journal
from cacheprobe.trace.places import Recording, free_beside, recording, saving, saying_why
from cacheprobe.trace.recording.assemble import meta_after, meta_before
from cacheprobe.trace.recording.disk_writer import DiskWriter, part_bytes_of
from cacheprobe.trace.recording.interrupts import Stop
from cacheprobe.trace.recording.later import read_now
from cacheprobe.trace.recording.part import Source
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.recording.restore import restore_recorder
from cacheprobe.trace.run_files import RunFiles
from cacheprobe.trace.storage import request_record
from cacheprobe.trace.trace import Trace, load_trace


@dataclass
class ToDisk:
    """Holds where a run is recorded, and the journal of the part of it that is there already."""

    place: Recording
    part_bytes: int
    background: Background
    """Writes the files while the run goes on."""
    journal: Journal | None = None
    stop: Stop | None = None
    """Says whether Ctrl-C stopped the run; None for a run that Ctrl-C does not stop."""
    finished_in: Path | None = None
    """Directory of the finished run; None before."""

    def begin(
        self, recorder: Recorder, requests: Sequence[Request], states: Sequence[SequenceState], meta: JsonDict
    ) -> DiskWriter:
        """Returns the writer of a run that begins, or that goes on where the journal ends.

        meta: metadata of the run that is known before its first pass.  states: of all requests, restored if it goes on.
        """
        directory, journal = self.place.directory, self.journal
        if journal is None:
            sites, heads = list(recorder.config.state_sites), list(recorder.config.heads)
            layers = sorted(recorder.layers) if sites or heads else []
            writer = self.begin_new(recorder, requests, meta, {"sites": sites, "heads": heads, "layers": layers})
            journal = _journal_in(directory)
        else:
            with saying_why(directory):
                cut_journal(journal)
                _delete_unnamed(journal)
            writer = None
        restore_recorder(recorder, states, journal)
        return writer or self._writer(recorder, journal, requests)

    def begin_new(
        self, source: Source, requests: Sequence[Request], meta: JsonDict, sites: Mapping[str, Sequence[object]]
    ) -> DiskWriter:
        """Begins the journal of a run or of an import, and returns its writer.

        meta: metadata that is known before the first pass.  sites: the lists `sites`, `heads` and `layers`.
        """
        directory = self.place.directory
        records = [request_record(request) for request in requests]
        started = [request.request_id for request in requests if request.cached is not None]
        content = {"run_id": self.place.run_id, "requests": records, "meta": meta, "from_snapshots": started}
        with saying_why(directory):
            begin_journal(directory, {**content, **sites})
        return self._writer(source, _journal_in(directory), requests)

    def _writer(self, source: Source, journal: Journal, requests: Sequence[Request]) -> DiskWriter:
        return DiskWriter(source, self.place, self.part_bytes, journal, requests, self.background)

    def finish(self, meta: JsonDict) -> Path:
        """Writes one table of each kind, and the manifest; returns the directory of the run. Call it after
        `DiskWriter.wait`. meta: of the whole run.

        If Ctrl-C stopped a run that was to replace a finished one, the finished run stays, and the stopped one gets a
        directory beside it; see `places.free_beside`.
        """
        run, place = GrowingRun(_journal_in(self.place.directory)), self.place
        if self.stop is not None and self.stop.was_pressed and place.replaces_a_run:
            self.finished_in = free_beside(place.directory)
            with saving(self.finished_in, place.run_id) as staging:
                files = RunFiles(self.finished_in, staging, place.run_id)
                for name in run.journal.names("states"):
                    files.write(name, lambda path, name=name: run.files.copy(name, path))
                run.finish(files, meta)
            place.drop()
        else:
            files = RunFiles(place.directory, place.staging, place.run_id)
            place.finish(lambda: run.finish(files, meta))
            self.finished_in = place.directory
        return self.finished_in


def assemble_on_disk(
    disk: ToDisk,
    writer: DiskWriter,
    recorder: Recorder,
    requests: Sequence[Request],
    states: Sequence[SequenceState],
    fingerprint: Mapping[str, object],
    config: EngineConfig,
    capture: CaptureConfig,
    meta: JsonDict,
) -> Trace:
    """Finishes a run that was recorded to disk, and returns its Trace, whose states are read at their first use.

    Twin: `assemble.assemble`, ==: the tables have the same lines, and the states the same bits.
    """
    directory = disk.place.directory
    if recorder.reader is not None:
        recorder.reader.require_ended()
    writer.end_round(states, is_last=True)
    writer.wait()
    run = GrowingRun(_journal_in(directory))
    has_readings, has_thoughts = (bool(run.journal.names(kind)) for kind in ("readings", "thoughts"))
    before = meta_before(recorder, fingerprint, config, capture, meta, has_thoughts)
    finished_in = disk.finish({**before, **meta_after(recorder, requests, run.texts, has_readings, meta)})
    trace = load_trace(finished_in, recorder.model)
    trace.reading_later = read_now if trace.is_unread else None
    return trace


def _journal_in(directory: Path) -> Journal:
    journal = read_journal(directory)
    assert journal is not None
    return journal


def _delete_unnamed(journal: Journal) -> None:
    """Deletes the run's files that the journal does not name: a kill came before their line was written."""
    waiting = journal.parts[-1]["waiting"] if journal.parts else None
    named = {*journal.checksums["files"], waiting["name"] if waiting else ""}
    for path in journal.directory.glob(f"*-{journal.run_id}-*"):
        if path.name not in named:
            path.unlink()


class ImportOutput(TypedDict, total=False):
    """Declares the types of the optional keywords that record a run or an import to disk while it goes on."""

    out: "str | Path | None"
    """Directory in which the run is recorded, part by part; by default it is recorded in memory. The Trace is then that
    of the directory. `cp.load_trace(out)` reads it while it grows, and `cp.resume(out, model)` continues it after a
    kill. An import cannot be continued; what was written of it can be read."""
    overwrite: bool
    """Replace a run that `out` holds. The new run is recorded beside a finished one, which stays whole and is what
    `cp.load_trace(out)` reads until the new run is finished; its files are then deleted. An unfinished one is deleted
    at once."""
    memory_budget: "int | str | None"
    """Most memory for what is recorded and not on the disk yet, such as "2GB"; by default a quarter of what is free, of
    which at most 192 MiB are used. The run waits for the disk rather than hold more."""


class OutputOptions(ImportOutput, total=False):
    """Declares the types of the optional keywords of `run` and `stream` that record a run to disk while it goes on."""

    command: JsonDict
    """How the run was started, to be stored as trace.meta["command"]."""
    replay: JsonDict
    """What another program said of the tokens, to be stored as trace.meta["replay"]; set by `cp.replay`."""


@contextmanager
def to_disk(
    out: "str | Path | None" = None,
    overwrite: bool = False,
    memory_budget: "int | str | None" = None,
    journal: Journal | None = None,
    stop: Stop | None = None,
) -> Iterator[ToDisk | None]:
    """Lets only this process record a run in the directory `out` during a `with` block; see `places.recording`. Yields
    None if `out` is None.

    overwrite, memory_budget: see `OutputOptions`.  journal: of the unfinished run that goes on; None for a new one.
    stop: of `cancelling`; None for a run that Ctrl-C does not stop.
    """
    if out is None:
        if overwrite or memory_budget is not None:
            raise ValueError("overwrite and memory_budget belong to a run that is recorded to disk; set out=DIRECTORY")
        yield None
        return
    budget = (available_bytes() or 2**32) // 4 if memory_budget is None else num_bytes("memory_budget", memory_budget)
    run_id = secrets.token_hex(4) if journal is None else journal.run_id
    with recording(folder("out", out), run_id, overwrite=overwrite) as place, Background() as background:
        yield ToDisk(place, part_bytes_of(budget), background, journal, stop)
