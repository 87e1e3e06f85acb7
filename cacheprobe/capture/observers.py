"""Defines observers that forward events to several observers, ignore them, or show progress."""

from collections.abc import Callable, Sequence

from torch import Tensor

from cacheprobe.core.progress import Progress
from cacheprobe.core.records import Finished, ForwardRecord, Observer, RowSlot, StepRecord, Thought


class Silent:
    """An Observer that ignores all events; a subclass overrides the few that it needs."""

    def before_forward(self, step: int, phase: str, rows: Sequence[RowSlot], shape: tuple[int, int]) -> None:
        """Ignores the start of a pass."""

    def after_forward(self, record: ForwardRecord) -> None:
        """Ignores a pass."""

    def on_thought(self, thought: Thought) -> None:
        """Ignores a thought."""

    def on_choice(self, request_id: int, step: int, position: int, token_id: int, logits: Tensor) -> None:
        """Ignores the choice of a token."""

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Ignores committed tokens."""

    def on_rollback(self, request_id: int, step: int, start: int, end: int) -> None:
        """Ignores rejected draft tokens."""

    def on_give_up(self, request_id: int, step: int, start: int, end: int) -> None:
        """Ignores dropped draft tokens."""

    def on_shared_prompt(self, request_id: int, step: int, source_id: int) -> None:
        """Ignores a shared prompt."""

    def on_preempt(self, request_id: int, step: int) -> None:
        """Ignores a preemption."""

    def on_compared(self, step: int, difference: str | None) -> None:
        """Ignores a comparison."""

    def on_failure(self, step: int) -> None:
        """Ignores a failed step."""

    def on_ledger(self, request_id: int, step: int, start: int, end: int, provenance: str) -> None:
        """Ignores a change of provenance."""

    def on_step(self, record: StepRecord) -> None:
        """Ignores the record of a step."""

    def on_finish(self, finished: Finished) -> None:
        """Ignores the end of a request."""


_EVENTS = [name for name in vars(Silent) if not name.startswith("_")]


class Tee(Silent):
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


class StepLog(Silent):
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


class ProgressBar(Silent):
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
