"""Prints on a terminal: progress bars on stderr, and small tables on stdout."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

SECONDS_BETWEEN_LINES = 20.0

P = TypeVar("P", bound="Progress")


class Progress:
    """Shows a job's progress on stderr while the `with` block runs: a bar on a terminal, else a line every 20 seconds
    or more. Prints nothing if `enabled` is False.

    The same object may be entered again later. Do not enter a second Progress inside the first: on a terminal, the two
    bars overwrite each other.
    total: units of the job.  done: units that an earlier call finished; they do not count for the rate.
    doing, unit: words such as "generating" and "tokens".
    says_end: without a terminal, print a line when the job is complete, even if it took less than 20 seconds.
    """

    def __init__(
        self, total: int, doing: str, unit: str, *, done: int = 0, enabled: bool = True, says_end: bool = False
    ) -> None:
        self.total, self.doing, self.unit, self.enabled, self.says_end = total, doing, unit, enabled, says_end
        self.done = self._first = done
        self._earlier_seconds = 0.0
        self._entered_at: float | None = None
        self._last_line_at = 0.0
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self: P) -> P:
        self._entered_at = time.monotonic()
        if not self._earlier_seconds:
            self._last_line_at = self._entered_at
        if self.enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            name, note = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[note]}"))
            columns = (name, BarColumn(), MofNCompleteColumn(), note, TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.doing, total=self.total, completed=self.done, note="")
        return self

    def __exit__(self, *exc: object) -> None:
        self._earlier_seconds, self._entered_at = self._seconds(), None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, units: int = 1, note: str = "") -> None:
        """Adds `units` to the count of finished units, and updates the display as `set_done` does. note: a few words
        shown beside the rate."""
        self.set_done(self.done + units, note)

    def set_done(self, done: int, note: str = "") -> None:
        """Sets the number of finished units, those of earlier calls included. Inside the `with`, updates the bar;
        without a terminal, prints a line if the last one is over 20 seconds old. note: a few words beside the rate."""
        self.done = done
        if self._entered_at is None:
            return
        now = time.monotonic()
        rate = (done - self._first) / max(self._seconds(), 1e-9)
        rate_and_note = ", ".join(filter(None, (f"{_rounded(rate)} {self.unit}/s", note)))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, note=rate_and_note)
        elif self.enabled and (
            now - self._last_line_at > SECONDS_BETWEEN_LINES or (self.says_end and done >= self.total)
        ):
            self._last_line_at = now
            left = f"{(self.total - done) / rate / 60:.1f} minutes left" if rate else "time left unknown"
            self.say(f"{self.doing}: {done} of {self.total} {self.unit}, {rate_and_note}, {left}")

    def _seconds(self) -> float:
        """Returns the seconds spent inside the `with` block, over all entries."""
        return self._earlier_seconds + (0.0 if self._entered_at is None else time.monotonic() - self._entered_at)

    def say(self, line: str) -> None:
        """Prints a line on stderr, above the bar if there is one; prints nothing if `enabled` is False."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        elif self.enabled:
            print(line, file=sys.stderr, flush=True)


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.3f}"


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hides transformers' progress bars inside the `with`, and shows them again afterwards if they were on."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@contextmanager
def announcing(message: str, is_shown: bool = True, after: float = 1.0) -> Iterator[None]:
    """Prints a line on stderr if what is inside the `with` takes longer than `after` seconds."""
    timer = threading.Timer(after, print, (message,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if is_shown:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- tables

DASH_PORT = 8050
"""Port at which `cacheprobe dash` listens by default. It prints its address."""


class Listing(NamedTuple):
    """Holds a small table for a terminal: a title, columns, lines of text cells, and a note. No text in it may have a
    line break, a tab or another control character; `visible` of core/tokens/text.py writes those as signs."""

    title: str
    columns: tuple[str, ...]
    """Names of the columns; () if every line is a name and a value."""
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    """Text printed below the lines, or in their place if there are none."""


def show(listings: Iterable[Listing]) -> None:
    """Prints the listings on stdout: drawn by rich on a terminal, else as plain lines with aligned columns."""
    draw = _draw if sys.stdout.isatty() else _write
    for listing in listings:
        draw(listing)


def lines(listing: Listing) -> list[str]:
    """Returns a listing as a list of plain text lines with aligned columns."""
    table = [listing.columns, *listing.rows] if listing.columns and listing.rows else list(listing.rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    aligned = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [listing.title, *(f"  {line}" for line in aligned), *([f"  {listing.note}"] if listing.note else [])]


def duration(seconds: float) -> str:
    """Returns a number of seconds as text in a suitable unit: "1.2 s", "12 s", "3.5 min" or "2.1 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _write(listing: Listing) -> None:
    print("\n".join(lines(listing)), end="\n\n")


def _draw(listing: Listing) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    table = Table(title=Text(listing.title, "bold"), title_justify="left", show_header=bool(listing.columns))
    for number, name in enumerate(listing.columns or ("", "")):
        table.add_column(Text(name), style=None if listing.columns or number else "bold", overflow="fold")
    for row in listing.rows:
        table.add_row(*map(Text, row))
    if listing.rows:
        console.print(table)
    else:
        console.print(Text(listing.title, "bold"))
    if listing.note:
        console.print(listing.note)
    console.print()
