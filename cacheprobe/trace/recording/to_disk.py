"""Records a run to disk from its first pass to its manifest, or goes on with one that was not finished."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.core.records import Finished, Request
from cacheprobe.core.values import JsonDict, folder, num_bytes
from cacheprobe.engine.sizes import available_bytes
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import STATUS_OF_REASON, Status
from cacheprobe.trace.journal import Journal, begin_journal, cut_journal, read_journal
from cacheprobe.trace.manifest import CheckedFiles
from cacheprobe.trace.places import Recording, free_beside, recording, saying_why
from cacheprobe.trace.recording.assemble import meta_after
from cacheprobe.trace.recording.disk_writer import Background, DiskWriter, part_bytes_of
from cacheprobe.trace.recording.lens_reader import Queued
from cacheprobe.trace.recording.observers import Stop
from cacheprobe.trace.recording.part import Source
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.recording.stored_states import read_now
from cacheprobe.trace.shards import header_of, read_tensors
from cacheprobe.trace.storage import RunFiles, finish_run, request_record
from cacheprobe.trace.stored import GrowingRun
from cacheprobe.trace.tables.build import rows_in_use
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
        journal = self.journal
        if journal is None:
            sites, heads = list(recorder.config.state_sites), list(recorder.config.heads)
            layers = sorted(recorder.layers) if sites or heads else []
            return self.begin_new(recorder, requests, meta, {"sites": sites, "heads": heads, "layers": layers})
        with saying_why(self.place.directory):
            cut_journal(journal)
            named = {*journal.files.sizes, journal.waiting["name"] if journal.waiting else ""}
            for path in journal.directory.glob(f"*-{journal.run_id}-*"):
                if path.name not in named:  # a kill came before the journal's line was written
                    path.unlink()
        restore_recorder(recorder, states, journal)
        return DiskWriter(recorder, self.place, self.part_bytes, journal, requests, self.background)

    def trace(
        self,
        writer: DiskWriter,
        states: Sequence[SequenceState],
        before: JsonDict,
        meta: JsonDict,
    ) -> Trace:
        """Finishes a run, and returns its Trace, whose states are read at their first use.

        before: from `meta_before`.  meta: the run's "errors" and "missing".
        Twin: `assemble.assemble`, ==: the tables have the same lines, and the states the same bits.
        """
        recorder = writer.recorder
        assert isinstance(recorder, Recorder)
        if recorder.reader is not None:
            recorder.reader.require_ended()
        writer.end_round(states, is_last=True)
        writer.wait()
        journal = _journal_in(self.place.directory)
        has_readings = bool(journal.files.names("readings"))
        after = meta_after(recorder, writer.requests, journal.texts, has_readings, meta)
        thinking = before["thinking"] if journal.files.names("thoughts") else None
        trace = load_trace(self.finish({**before, "thinking": thinking, **after}), recorder.model)
        trace.reading_later = read_now if trace.is_unread else None
        return trace

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
        return DiskWriter(source, self.place, self.part_bytes, _journal_in(directory), requests, self.background)

    def finish(self, meta: JsonDict) -> Path:
        """Writes one table of each kind, and the manifest; returns the directory of the run. Call it after
        `DiskWriter.wait`. meta: of the whole run.

        If Ctrl-C stopped a run that was to replace a finished one, the finished run stays, and the stopped one gets a
        directory beside it; see `places.free_beside`.
        """
        run, place = GrowingRun(_journal_in(self.place.directory)), self.place
        if self.stop is not None and self.stop.was_pressed and place.replaces_a_run:
            self.finished_in = free_beside(place.directory)
            with recording(self.finished_in, place.run_id, is_kept=False) as beside:
                beside.finish(lambda: finish_run(run, RunFiles.of(beside), meta))
            place.drop()
        else:
            place.finish(lambda: finish_run(run, RunFiles.of(place), meta))
            self.finished_in = place.directory
        return self.finished_in


def _journal_in(directory: Path) -> Journal:
    journal = read_journal(directory)
    assert journal is not None
    return journal


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


def restore_states(states: Sequence[SequenceState], journal: Journal) -> list[SequenceState]:
    """Gives each request its committed tokens and its end, as the journal has them. Returns the requests that have not
    ended; those with committed tokens count as preempted, so that the run computes their keys and values again."""
    tokens, ends, errors = journal.tokens, journal.gathered("finish"), journal.gathered("errors")
    for state in states:
        committed, reason = tokens[state.request_id], ends.get(str(state.request_id))
        state.token_ids = [*state.request.prompt_token_ids, *committed]
        if reason is not None:
            state.status = STATUS_OF_REASON.get(reason, Status.FINISHED)
            state.finish, state.error = reason, errors.get(str(state.request_id))
        elif committed:
            state.status = Status.PREEMPTED
    return [state for state in states if not state.is_ended]


def restore_recorder(recorder: Recorder, states: Sequence[SequenceState], journal: Journal) -> None:
    """Makes a new recorder go on after the newest part of the journal. states: of all requests, restored."""
    if not journal.parts:
        return
    last, step = journal.parts[-1], journal.last_step
    recorder.num_taken, recorder.kept.num_rows = last["num_rows"], last["num_states"]
    roles: dict[int, list[str]] = {}
    for part in journal.parts:
        for request_id, added in part["roles"].items():
            roles.setdefault(int(request_id), []).extend(added)
    for state in states:
        own = roles.get(state.request_id, [])
        recorder.committed_roles(state.request_id, state.request.num_prompt_tokens, own)
        if state.is_ended:
            finish = Finished(state.request_id, step, state.finish or "", tuple(state.generated))
            recorder.finished[state.request_id] = finish
    recorder.answer_mass |= {int(key): tuple(mass) for key, mass in journal.gathered("answer_mass").items()}
    recorder.preemptions += [(request_id, at) for request_id, at in last["preemptions"]]
    recorder.num_compared = last["self_checks"]["compared"]
    recorder.differences += last["self_checks"]["differences"]
    stored = {check["name"]: check for check in last["checks"]}
    for name in ("residual_check", "lens_check"):
        check = getattr(recorder, name)
        setattr(recorder, name, replace(check, **stored.get(check.name, {})))
    run = GrowingRun(journal)
    _restore_shapes(recorder, run)
    _restore_readings(recorder, journal)
    in_use = rows_in_use(run.ledger).groupby("request_id").rows.last().to_dict()
    for state in states:
        if state.status is Status.PREEMPTED and in_use[state.request_id]:  # else it was preempted before the kill
            recorder.on_ledger(state.request_id, step, 0, in_use[state.request_id], "free")
            recorder.on_preempt(state.request_id, step)


def _restore_shapes(recorder: Recorder, run: GrowingRun) -> None:
    """Tells the recorder the shapes of head activations, from the parts, if heads are recorded."""
    if not recorder.config.heads:
        return
    for name in run.shards:
        for key, entry in header_of(run.files, name).items():
            site, layer = key.split(".")
            if site in recorder.config.heads and entry["shape"] != [0]:
                heads = recorder.model.head_shape[0] if site == PATTERN else 1
                recorder.kept.shapes[site, int(layer)] = tuple(entry["shape"][1:]), heads


def _restore_readings(recorder: Recorder, journal: Journal) -> None:
    """Queues the rows that waited for their next token for the lens again."""
    waiting, reader = journal.waiting, recorder.reader
    if reader is None:
        return
    reader.errors |= {int(key): why for key, why in journal.gathered("lens_errors").items()}
    if waiting is None:
        return
    files = CheckedFiles(journal.directory, waiting)
    tensors = read_tensors(files, waiting["name"])
    counts = tensors["places"][:, 4].tolist()
    parts = (tensors["places"].tolist(), tensors["states"].split(counts), tensors["layers"].split(counts))
    for (row, position, request_id, step, _), states, layers in zip(*parts, strict=True):
        place = dict(request_id=request_id, step=step)
        reader.queue(request_id, Queued(row, position, states.to(recorder.model.device), layers, **place))
