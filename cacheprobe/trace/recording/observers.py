"""Defines three observers of a run: Tee forwards its events, StepLog keeps them, ProgressBar counts tokens."""

from collections.abc import Callable, Sequence

from cacheprobe.core.records import Finished, Observer, StepRecord
from cacheprobe.core.terminal import Progress

_EVENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Tee(Observer):
    """Forwards every event of a run to each of several observers, in their order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        for name in _EVENTS:
            setattr(self, name, _all([getattr(observer, name) for observer in observers]))


def _all(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Returns a function that passes its arguments to each function of `calls`, in order."""

    def each(*args: object) -> None:
        """Calls each function of `calls` with these arguments."""
        for call in calls:
            call(*args)

    return each


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


class ProgressBar(Observer):
    """Shows a bar with the committed tokens, tokens per second and time left.

    total_tokens: number of tokens that are committed if no request ends early.  done: tokens committed before.
    """

    def __init__(self, total_tokens: int, enabled: bool = True, done: int = 0) -> None:
        self._bar = Progress(total_tokens, "generating", "tokens", enabled=enabled, done=done)

    def __enter__(self) -> "ProgressBar":
        self._bar.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.__exit__(*exc)

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Advances the bar by the number of committed tokens."""
        self._bar.advance(len(token_ids))
