"""How a long job goes: a bar with rate and time left on a terminal, plain lines elsewhere. All of it on stderr."""

import sys
import time
from typing import Any, TypeVar

SECONDS_BETWEEN_LINES = 20.0

P = TypeVar("P", bound="Progress")


class Progress:
    """Enter it, and tell it how far the job is; where it is not enabled it says nothing. May be entered again: one bar
    at a time is all that a terminal takes.

    total: units of the job, `done` of which an earlier call did: they count for no rate.  doing, unit: as in
    "generating" and "tokens".  says_end: the end is worth a line where there is no terminal, however soon it came; else
    a job that is over before its first line was due says nothing there.
    """

    def __init__(
        self, total: int, doing: str, unit: str, *, done: int = 0, enabled: bool = True, says_end: bool = False
    ) -> None:
        self.total, self.doing, self.unit, self.enabled, self.says_end = total, doing, unit, enabled, says_end
        self.done = self._first = done
        self._spent = 0.0
        self._began: float | None = None
        self._spoken = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self: P) -> P:
        self._began = time.monotonic()
        if not self._spent:
            self._spoken = self._began
        if self.enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            name, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
            columns = (name, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.doing, total=self.total, completed=self.done, note="")
        return self

    def __exit__(self, *exc: object) -> None:
        self._spent, self._began = self._seconds(), None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, units: int = 1, note: str = "") -> None:
        """So many units more are done. note: a few words beside the rate."""
        self.at(self.done + units, note)

    def at(self, done: int, note: str = "") -> None:
        """So many units are done in all."""
        self.done = done
        if self._began is None:
            return
        now = time.monotonic()
        rate = (done - self._first) / max(self._seconds(), 1e-9)
        said = ", ".join(filter(None, (f"{_number(rate)} {self.unit}/s", note)))
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=said)
        elif self.enabled and (now - self._spoken > SECONDS_BETWEEN_LINES or (self.says_end and done >= self.total)):
            self._spoken = now
            left = f"{(self.total - done) / rate / 60:.1f} minutes left" if rate else "time left unknown"
            self.say(f"{self.doing}: {done} of {self.total} {self.unit}, {said}, {left}")

    def _seconds(self) -> float:
        """Between entering and leaving, all times together."""
        return self._spent + (0.0 if self._began is None else time.monotonic() - self._began)

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        elif self.enabled:
            print(line, file=sys.stderr, flush=True)


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.3f}"
