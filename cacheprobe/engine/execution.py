"""Executes a RunPlan: runs the main loop under the run's hooks, and records it in memory or to disk."""

from collections.abc import Generator, Sequence
from contextlib import closing

from cacheprobe.core.config import CaptureConfig, EngineConfig
from cacheprobe.core.records import Observer
from cacheprobe.core.values import JsonDict
from cacheprobe.engine.fingerprint import FingerprintMismatch, RunGuard
from cacheprobe.engine.plan import BoundLoop, RunPlan
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.recording.assemble import assemble, meta_before
from cacheprobe.trace.recording.disk_writer import DiskWriter
from cacheprobe.trace.recording.observers import Tee
from cacheprobe.trace.recording.to_disk import ToDisk
from cacheprobe.trace.trace import Trace


class Execution:
    """Holds one run of a plan: its requests' states, its recorder, and the writer if it is recorded to disk."""

    def __init__(
        self,
        plan: RunPlan,
        loop: BoundLoop,
        states: Sequence[SequenceState],
        observers: Sequence[Observer] = (),
        disk: ToDisk | None = None,
        **meta: object,
    ) -> None:
        """Prepares the run, whose first pass runs later. loop: from `plan.bind_loop`.  meta: entries of the Trace's
        metadata.  disk: where the run is recorded; None for the memory. States that have ended are not run."""
        self.plan, self.states, self.disk, self._meta = plan, states, disk, meta
        self.recorder = plan.recorder()
        self._guard = RunGuard(plan.model, plan.fingerprint)
        self.writer: DiskWriter | None = None
        if disk is not None:
            with hold_model(plan.model):
                known = meta_before(self.recorder, *self._settings(plan.meta(meta)))
            self.writer = disk.begin(self.recorder, plan.requests, states, known)
        writers = () if self.writer is None else (self.writer,)
        ahead = [state for state in states if not state.is_ended]
        observer = Tee(self.recorder, *writers, *observers)
        self._rounds = loop(ahead, observer) if ahead or not states else nothing_to_run()

    def _settings(self, meta: JsonDict) -> tuple[JsonDict, EngineConfig, CaptureConfig, JsonDict]:
        """Returns (fingerprint, engine settings, capture settings, `meta`): what metadata is made from."""
        return self._guard.fingerprint, self.plan.config, self.plan.capture, meta

    def run(self) -> Trace:
        """Runs every request to its end and returns the recorded Trace. Runs in other threads wait meanwhile."""
        with closing(self._rounds), self._guard.holding(self.plan.hooks(self.recorder)):
            for _ in self._rounds:
                self._end_round()
        return self._trace()

    def steps(self) -> Generator[int, None, Trace]:
        """Runs the requests and yields the step number after each round. The generator's return value is the Trace.

        While the generator waits, the run's hooks are not on the model, and other runs may use the model.
        """
        with closing(self._rounds):
            while True:
                with self._guard.holding(self.plan.hooks(self.recorder)):
                    step = next(self._rounds, None)
                if step is None:
                    break
                self._end_round()
                yield step
        return self._trace()

    def _end_round(self) -> None:
        """Lets the writer, if there is one, name in the journal what it has written."""
        if self.writer is not None:
            self.writer.end_round(self.states)

    def _trace(self) -> Trace:
        """Returns the Trace of a finished run, with its metadata, errors, interventions and kept KVSnapshots.

        Raises: FingerprintMismatch if weights or settings changed since the run began. What was recorded on the disk is
        then deleted: nobody knows which of it has which weights, and it could be continued.
        """
        plan, states = self.plan, self.states
        try:
            self._guard.require_unchanged()
        except FingerprintMismatch:
            if self.disk is not None and self.writer is not None:
                self.writer.wait()
                self.disk.place.drop()
            raise
        errors = {str(state.request_id): state.error for state in states if state.error}
        meta = {**plan.meta(self._meta), "errors": errors, "missing": plan.missing_answers()}
        with hold_model(plan.model):
            if self.disk is None or self.writer is None:
                trace = assemble(self.recorder, plan.requests, *self._settings(meta))
            else:
                before = meta_before(self.recorder, *self._settings(meta))
                trace = self.disk.trace(self.writer, states, before, meta)
        trace.interventions = plan.interventions
        trace.kept_rows = {s.request_id: s.kept_rows for s in states if s.kept_rows is not None}
        return trace


def nothing_to_run() -> Generator[int, None, None]:
    """Returns a generator without a step, for a run whose requests have all ended."""
    yield from ()
