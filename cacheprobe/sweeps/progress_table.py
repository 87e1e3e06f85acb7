"""Shows the progress of a sweep on stderr: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from cacheprobe.core.terminal import SECONDS_BETWEEN_LINES, duration
from cacheprobe.sweeps.events import Event

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table


class ProgressTable:
    """Shows the progress of a sweep while the `with` block runs: a live table on a terminal, plain lines elsewhere.

    total: number of cells in the plan.  done: number of cells committed before.  names: labels of the cells, by digest.
    enabled: False shows no table and prints no lines.
    """

    def __init__(self, total: int, done: int, names: dict[str, str], backend: str, enabled: bool) -> None:
        self.total, self.first, self.names, self.backend, self.enabled = total, done, names, backend, enabled
        self.committed, self.size, self.deaths = 0, 0, 0
        self.failures: Counter[str] = Counter()
        self.running: dict[str, str] = {}
        """Dictionary worker -> label of the running cell."""
        self._began = self._printed = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> "ProgressTable":
        self._began = self._printed = time.monotonic()
        if self.enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live as RichLive

            self._live = RichLive(self.table(), console=Console(stderr=True), refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, event: Event) -> None:
        """Adds an event of the sweep to the counts. If enabled, updates the live table on a terminal, and elsewhere
        prints a line at most every SECONDS_BETWEEN_LINES (20) seconds."""
        if event.event == "started":
            self.running[event.worker] = self.names.get(event.digest, event.digest)
        elif event.event == "worker_died":
            self.deaths += 1
            self.running.pop(event.worker, None)
        elif event.outcome is not None:
            self.running.pop(event.worker, None)
            if event.outcome.is_committed:
                self.committed += 1
                self.size += event.outcome.size
            else:
                self.failures[event.outcome.cause] += 1
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self.table())
        elif self.enabled and now - self._printed > SECONDS_BETWEEN_LINES:
            self._printed = now
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Returns the progress as one line of text: cells done, rate, time left, failures by cause."""
        text = f"sweep: {self.first + self.committed} of {self.total} cells, {self._rate()}, {self._left()} left"
        return text + (f", failed: {self._causes()}" if self.failures else "")

    def table(self) -> "Table":
        """Returns the progress as a Table of the library rich: one line for each figure, such as rate, and each busy
        worker."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=f"sweep on {self.backend}", title_justify="left", show_header=False)
        rows = {
            "committed": f"{self.first + self.committed} of {self.total}, {self.first} of them before",
            "rate": self._rate(),
            "time left": self._left(),
            "written": f"{self.size / 1e6:.1f} MB",
            "failed": self._causes() or "none",
            "workers that died": str(self.deaths),
            **{f"worker {worker}": cell for worker, cell in sorted(self.running.items())},
        }
        for name, value in rows.items():
            table.add_row(Text(name, "bold"), Text(value, overflow="ellipsis", no_wrap=True))
        return table

    def _per_second(self) -> float:
        return (self.committed + self.failures.total()) / max(time.monotonic() - self._began, 1e-9)

    def _rate(self) -> str:
        return f"{60 * self._per_second():.1f} cells a minute"

    def _left(self) -> str:
        rest, rate = self.total - self.first - self.committed - self.failures.total(), self._per_second()
        return duration(rest / rate) if rate else "unknown time"

    def _causes(self) -> str:
        return ", ".join(f"{count} {cause}" for cause, count in self.failures.most_common())
