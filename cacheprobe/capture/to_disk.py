"""Records a run to disk from its first pass to its manifest, or goes on with one that was not finished."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from cacheprobe.capture.assemble import meta_after, meta_before
from cacheprobe.capture.disk_writer import DiskWriter, part_bytes_of
from cacheprobe.capture.later import read_now
from cacheprobe.capture.recorder import Recorder
from cacheprobe.capture.restore import restore_recorder
from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.records import Request
from cacheprobe.core.values import JsonDict, num_bytes
from cacheprobe.engine.sizes import available_bytes
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.parts.growing import GrowingRun
from cacheprobe.trace.parts.journal import Journal, begin_journal, cut_journal, read_journal
from cacheprobe.trace.places import Recording, recording, saying_why
from cacheprobe.trace.run_files import RunFiles
from cacheprobe.trace.storage import request_record
from cacheprobe.trace.trace import Trace, load_trace


@dataclass
class ToDisk:
    """Holds where a run is recorded, and the journal of the part of it that is there already."""

    place: Recording
    part_bytes: int
    journal: Journal | None = None

    def begin(
        self, recorder: Recorder, requests: Sequence[Request], states: Sequence[SequenceState], meta: JsonDict
    ) -> DiskWriter:
        """Returns the writer of a run that begins, or that goes on where the journal ends.

        meta: metadata of the run that is known before its first pass.  states: of all requests, restored if it goes on.
        """
        directory, journal = self.place.directory, self.journal
        with saying_why(directory):
            if journal is None:
                sites, heads = list(recorder.config.state_sites), list(recorder.config.heads)
                layers = sorted(recorder.layers) if sites or heads else []
                records = [request_record(request) for request in requests]
                started = [request.request_id for request in requests if request.cached is not None]
                content = {"run_id": self.place.run_id, "requests": records, "meta": meta, "from_snapshots": started}
                begin_journal(directory, {**content, "sites": sites, "heads": heads, "layers": layers})
                journal = _journal_in(directory)
            else:
                cut_journal(journal)
                _delete_unnamed(journal)
        restore_recorder(recorder, states, journal)
        return DiskWriter(recorder, self.place, self.part_bytes, journal, requests)

    def finish(self, meta: JsonDict) -> None:
        """Writes one table of each kind, and the manifest. meta: of the whole run."""
        self.place.finish(lambda: GrowingRun(_journal_in(self.place.directory)).finish(self._files(), meta))

    def _files(self) -> RunFiles:
        return RunFiles(self.place.directory, self.place.staging, self.place.run_id)


def assemble_on_disk(
    disk: ToDisk,
    writer: DiskWriter,
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
    recorder, directory = writer.recorder, disk.place.directory
    if recorder.reader is not None:
        recorder.reader.require_ended()
    writer.end_round(states, is_last=True)
    run = GrowingRun(_journal_in(directory))
    has_readings, has_thoughts = (bool(run.journal.names(kind)) for kind in ("readings", "thoughts"))
    before = meta_before(recorder, fingerprint, config, capture, meta, has_thoughts)
    disk.finish({**before, **meta_after(recorder, requests, run.texts, has_readings, meta)})
    trace = load_trace(directory, recorder.model)
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


class OutputOptions(TypedDict, total=False):
    """Declares the types of the optional keywords of `run` and `stream` that record a run to disk while it goes on."""

    out: "str | Path | None"
    """Directory in which the run is recorded, part by part; by default it is recorded in memory. The Trace is then that
    of the directory. `cp.load_trace(out)` reads it while it grows, and `cp.resume(out, model)` continues it after a
    kill."""
    overwrite: bool
    """Replace a run that `out` holds; a finished one stays until the new run is finished."""
    memory_budget: "int | str | None"
    """Most memory for what is recorded and not on the disk yet, such as "2GB"; by default a quarter of what is free, of
    which at most 192 MiB are used. The run waits for the disk rather than hold more."""
    command: JsonDict
    """How the run was started, to be stored as trace.meta["command"]."""


@contextmanager
def to_disk(
    out: "str | Path | None" = None,
    overwrite: bool = False,
    memory_budget: "int | str | None" = None,
    journal: Journal | None = None,
) -> Iterator[ToDisk | None]:
    """Lets only this process record a run in the directory `out` during a `with` block; see `places.recording`. Yields
    None if `out` is None.

    overwrite, memory_budget: see `OutputOptions`.  journal: of the unfinished run that goes on; None for a new one.
    """
    if out is None:
        if overwrite or memory_budget is not None:
            raise ValueError("overwrite and memory_budget belong to a run that is recorded to disk; set out=DIRECTORY")
        yield None
        return
    budget = (available_bytes() or 2**32) // 4 if memory_budget is None else num_bytes("memory_budget", memory_budget)
    run_id = secrets.token_hex(4) if journal is None else journal.run_id
    with recording(Path(out), run_id, overwrite=overwrite) as place:
        yield ToDisk(place, part_bytes_of(budget), journal)
