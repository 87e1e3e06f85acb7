"""Observers that pass the word on: several at once, and a progress bar."""

from collections.abc import Callable, Sequence
from typing import Any

from cacheprobe.records import Finished, Observer, StepRecord


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


class ProgressBar:
    """Committed tokens, rate and time left; silent where the output is no terminal, or where not enabled."""

    def __init__(self, total_tokens: int, enabled: bool = True) -> None:
        self.total, self.enabled = total_tokens, enabled
        self._expected: dict[int, int] = {}
        self._bar: Any = None

    def __enter__(self) -> "ProgressBar":
        if self.enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(stderr=True)
            if console.is_terminal:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
                rate = TextColumn("{task.fields[rate]} tokens/s")
                self._bar = Progress(*columns, rate, TimeRemainingColumn(), console=console, transient=True)
                self._bar.start()
                self._task = self._bar.add_task("generating", total=self.total, rate="-")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        if self._bar is not None:
            speed = self._bar.tasks[0].speed
            self._bar.update(self._task, advance=len(token_ids), rate=f"{speed:.1f}" if speed else "-")

    def on_finish(self, finished: Finished) -> None:
        """A request that stops early leaves less to do."""

    def on_step(self, record: StepRecord) -> None: ...

    def before_forward(self, *args: Any) -> None: ...

    def after_forward(self, *args: Any) -> None: ...

    def on_choice(self, *args: Any) -> None: ...

    def on_rollback(self, *args: Any) -> None: ...

    def on_ledger(self, *args: Any) -> None: ...
