"""Defines StepLog, which keeps the events of a run without its tensors."""

from cacheprobe.core.records import Finished, Observer, StepRecord


class StepLog(Observer):
    """Keeps a run's step records, how each request ended, and the preemptions; keeps no tensors."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.finished: dict[int, Finished] = {}
        self.preemptions: list[tuple[int, int]] = []

    def on_step(self, record: StepRecord) -> None:
        """Appends the step's record to `steps`."""
        self.steps.append(record)

    def on_finish(self, finished: Finished) -> None:
        """Stores how a request ended in `finished`, by request id."""
        self.finished[finished.request_id] = finished

    def on_preempt(self, request_id: int, step: int) -> None:
        """Appends (request_id, step) to `preemptions`."""
        self.preemptions.append((request_id, step))
