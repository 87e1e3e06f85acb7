"""Defines observers that forward events to several observers, keep them, or show progress."""

from collections.abc import Callable, Sequence

from cacheprobe.core.progress import Progress
from cacheprobe.core.records import Finished, Observer, StepRecord

_EVENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Tee(Observer):
    """Forwards every event to every observer, in order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        for name in _EVENTS:
            setattr(self, name, _all([getattr(observer, name) for observer in observers]))


def _all(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Returns a function that calls each of these with its arguments."""

    def each(*args: object) -> None:
        """Calls this method of every observer."""
        for call in calls:
            call(*args)

    return each


class StepLog(Observer):
    """Keeps the records of steps, ends and preemptions, and no tensors."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.finished: dict[int, Finished] = {}
        self.preemptions: list[tuple[int, int]] = []

    def on_step(self, record: StepRecord) -> None:
        """Keeps the step's record."""
        self.steps.append(record)

    def on_finish(self, finished: Finished) -> None:
        """Keeps how the request ended."""
        self.finished[finished.request_id] = finished

    def on_preempt(self, request_id: int, step: int) -> None:
        """Keeps (request_id, step)."""
        self.preemptions.append((request_id, step))


class ProgressBar(Observer):
    """Shows committed tokens, rate and time left. total_tokens: the most that can be committed."""

    def __init__(self, total_tokens: int, enabled: bool = True) -> None:
        self._shown = Progress(total_tokens, "generating", "tokens", enabled=enabled)

    def __enter__(self) -> "ProgressBar":
        self._shown.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._shown.__exit__(*exc)

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Counts the committed tokens."""
        self._shown.advance(len(token_ids))
