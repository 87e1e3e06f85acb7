"""How a training goes: a bar with rate and time left on a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any


class TrainingProgress:
    """Call it after every step with a few words; `say` prints a line that stays."""

    def __init__(self, total_steps: int, done: int, enabled: bool) -> None:
        self.total, self.first, self.enabled = total_steps, done, enabled
        self._began = self._spoken = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "TrainingProgress":
        if self.enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(stderr=True)
            if console.is_terminal:
                columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
                self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
                self._bar.start()
                self._task = self._bar.add_task("training", total=self.total, completed=self.first, note="")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, words: str) -> None:
        seconds = time.monotonic() - self._began
        rate = (done - self.first) / max(seconds, 1e-9)
        note = f"{rate:.2f} steps/s, {words}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif self.enabled and (time.monotonic() - self._spoken > 20 or done == self.total):
            self._spoken = time.monotonic()
            left = (self.total - done) / max(rate, 1e-9)
            self.say(f"step {done} of {self.total}, {note}, {left / 60:.1f} minutes left")

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        elif self.enabled:
            print(line, file=sys.stderr, flush=True)
