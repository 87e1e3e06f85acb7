"""Writes a run to disk while it goes on: the recorder's rows, states and readings, part by part, with a journal.

A part is written if the recorder holds `part_bytes`, or after a time that grows with the run. It is named in the
journal at the end of a round of the main loop only: then every admitted request has read its prompt, so that a run can
be continued there. `trace/stored.py` reads the parts.

The files and the journal are written in the background, in their order. A recorder that holds `part_bytes` waits until
the earlier files are on the disk.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType

import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from cacheprobe.core.records import Finished, Observer, Request, StepRecord
from cacheprobe.core.values import JsonDict
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.journal import Journal, append_part
from cacheprobe.trace.places import Recording, saying_why
from cacheprobe.trace.recording.lens_reader import Queued
from cacheprobe.trace.recording.part import Source
from cacheprobe.trace.state_store import tensor_key
from cacheprobe.trace.storage import RunFiles
from cacheprobe.trace.tables import build as tables
from cacheprobe.trace.tables.thoughts import first_logits, thought_lines, thought_states


class Background:
    """Runs jobs one after the other, in the order in which they were added. After a job that failed, no job runs.

    Used in a `with` block, whose end waits for the jobs; after Ctrl-C only for the one that runs, and the others are
    dropped.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self._is_dropped = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, job: Callable[[], object]) -> None:
        """Adds a job. Raises: the error of an earlier job, if one has failed already."""
        self._require_success()
        if self._thread is None:  # a daemon: a stream that nobody ends does not keep the process alive
            self._thread = threading.Thread(target=self._work, name="cacheprobe-files", daemon=True)
            self._thread.start()
        with self._changed:
            self._num_left += 1
        self._jobs.put(job)

    @property
    def is_idle(self) -> bool:
        """True if every job has run, or one has failed."""
        return not self._num_left or self._error is not None

    def wait(self) -> None:
        """Waits until every job has run. Raises: the error of the first that failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_left)
        self._require_success()

    def __enter__(self) -> "Background":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _place: TracebackType | None
    ) -> None:
        is_own_thread = self._thread is threading.current_thread()  # the garbage collector closes a stream there
        self._is_dropped |= is_own_thread or (kind is not None and issubclass(kind, KeyboardInterrupt))
        self._jobs.put(None)
        pressed = None if is_own_thread else self._wait_for_the_end()
        if self._error is not None and (kind is None or kind is GeneratorExit):
            raise self._error
        if self._error is not None and error is not None and error is not self._error:
            error.add_note(f"what was recorded was not all written: {self._error}")
        if pressed is not None and kind is None:
            raise pressed

    def _wait_for_the_end(self) -> KeyboardInterrupt | None:
        """Waits until no job runs. Ctrl-C drops the jobs that have not begun, but does not end the waiting: nobody else
        may write the run before. Returns the exception of Ctrl-C; None if it was not pressed."""
        pressed = None
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._num_left)
                return pressed
            except KeyboardInterrupt as again:
                pressed, self._is_dropped = again, True

    def _require_success(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """Takes jobs until there is None."""
        while (job := self._jobs.get()) is not None:
            if self._error is None and not self._is_dropped:
                try:
                    job()
                except BaseException as error:
                    self._error = error
            del job  # with the tensors of its part
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()


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
    """Writes the parts of one run. Must receive the events of the run after its recorder."""

    def __init__(
        self,
        recorder: Source,
        place: Recording,
        part_bytes: int,
        journal: Journal,
        requests: Sequence[Request],
        background: Background,
    ) -> None:
        """Prepares a writer for the run of `recorder`, into the directory of `place`.

        part_bytes: see `part_bytes_of`.  journal: the run's journal so far.  requests: all of the run.  background:
        runs the writer's jobs alone.
        """
        self.recorder, self.place, self.part_bytes, self.requests = recorder, place, part_bytes, requests
        self._background = background
        self._files = RunFiles.of(place)
        """Used by the background's jobs alone."""
        self._number = journal.next_number
        self._tokens, self._texts = journal.tokens, journal.texts
        self._is_due = self._is_late = False
        """Whether there are files that the journal does not name yet, and whether the recorder was full again since."""
        self._labelled: list[list[object]] = []
        self._committed: dict[int, list[int]] = {}
        self._roles: dict[int, list[str]] = {}
        self._finished: dict[int, Finished] = {}
        self._num_masses = len(recorder.answer_mass)
        self._seen_tokens = set(journal.token_texts)
        self._new_tokens: set[int] = set()
        self._has_states = bool(journal.files.names("states", "safetensors"))
        self.step = journal.last_step
        """Number of the newest step, which the next line of the journal names."""
        self._waiting = journal.waiting["name"] if journal.waiting else None
        """Name of the file of waiting rows that the newest line of the journal names; None without one."""
        self._began = self._last = time.monotonic()

    # -- events

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Keeps committed tokens and their roles for the journal."""
        self._committed.setdefault(request_id, []).extend(token_ids)
        self._tokens[request_id].extend(token_ids)
        self._roles.setdefault(request_id, []).extend(roles)

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
        self._labelled, self._committed, self._roles, self._finished = [], {}, {}, {}
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
        part, texts_of = self.recorder.take(), self.recorder.token_texts
        self._labelled += [[number, row.role, row.status, row.state_index] for number, row in part.labelled]
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
            thoughts = {"states": thought_states(part.thoughts), "first_logits": logits}
            self._write_tensors("thoughts", lambda: thoughts)
        # a run that keeps no row has a file of states too, with empty tensors
        if part.num_states or (part.num_states == 0 and not self._has_states):
            join = part.states
            self._write_tensors(
                "states", lambda: {tensor_key(*at): states.contiguous() for at, states in join().items()}
            )
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

    def _write_tensors(self, kind: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        name = f"{kind}-{self.place.run_id}-{self._number:05d}.safetensors"
        self._in_background(lambda: self._files.write_tensors(name, tensors()))

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
            "roles": _by_text(self._roles),
            "texts": _by_text(texts),
            "token_texts": list(zip(new, recorder.token_texts(new), strict=True)),
            "finish": _by_text({number: finished.reason for number, finished in self._finished.items()}),
            "errors": dict(errors),
            "answer_mass": _by_text(masses),
            "lens_errors": {} if reader is None else _by_text(reader.errors),
        }

    def _new_text(self, request_id: int) -> tuple[int, str]:
        """Returns (number of characters of the request's earlier text that stay, the text after them). A new token may
        change an incomplete character before it."""
        prompt = self.requests[request_id].prompt_token_ids
        earlier, now = self._texts[request_id], self.recorder.decode(self._tokens[request_id], after=prompt)
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
