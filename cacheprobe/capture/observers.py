"""Observers that pass the word on: several at once, and a progress bar."""

from collections.abc import Callable, Sequence
from typing import Any

from cacheprobe.core.progress import Progress
from cacheprobe.core.records import Finished, Observer, StepRecord


class Tee:
    """Every call to every observer, in order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not (name.startswith("on_") or name in ("before_forward", "after_forward")):
            raise AttributeError(name)
        calls = [getattr(observer, name) for observer in self.observers]

        def each(*args: Any) -> None:
            for call in calls:
                call(*args)

        setattr(self, name, each)
        return each


class Silent:
    """An Observer that listens to nothing: what listens to a few calls inherits the rest."""

    def before_forward(self, *args: Any, **named: Any) -> None: ...

    def after_forward(self, *args: Any, **named: Any) -> None: ...

    def on_thought(self, *args: Any, **named: Any) -> None: ...

    def on_choice(self, *args: Any, **named: Any) -> None: ...

    def on_commit(self, *args: Any, **named: Any) -> None: ...

    def on_rollback(self, *args: Any, **named: Any) -> None: ...

    def on_give_up(self, *args: Any, **named: Any) -> None: ...

    def on_shared_prompt(self, *args: Any, **named: Any) -> None: ...

    def on_preempt(self, *args: Any, **named: Any) -> None: ...

    def on_compared(self, *args: Any, **named: Any) -> None: ...

    def on_failure(self, *args: Any, **named: Any) -> None: ...

    def on_ledger(self, *args: Any, **named: Any) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...

    def on_finish(self, finished: Finished) -> None: ...


class StepLog(Silent):
    """Keeps the records of the steps, the ends and the evictions, and nothing of the model's insides."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.finished: dict[int, Finished] = {}
        self.preemptions: list[tuple[int, int]] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_finish(self, finished: Finished) -> None:
        self.finished[finished.request_id] = finished

    def on_preempt(self, request_id: int, step: int) -> None:
        self.preemptions.append((request_id, step))


class ProgressBar(Silent):
    """Committed tokens, rate and time left; `total_tokens` are the most that there can be."""

    def __init__(self, total_tokens: int, enabled: bool = True) -> None:
        self._shown = Progress(total_tokens, "generating", "tokens", enabled=enabled)

    def __enter__(self) -> "ProgressBar":
        self._shown.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._shown.__exit__(*exc)

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        self._shown.advance(len(token_ids))
