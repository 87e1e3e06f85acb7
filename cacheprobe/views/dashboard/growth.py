"""Follows a run that is recorded to disk while the dashboard shows it, and says how far the run is."""

import time
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

from cacheprobe.core.terminal import duration
from cacheprobe.core.values import JsonDict
from cacheprobe.trace.manifest import JOURNAL, MANIFEST, TraceError
from cacheprobe.trace.parts.growing import GrowingRun, growing_run
from cacheprobe.trace.parts.journal import Journal
from cacheprobe.trace.places import recorded_by
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views.dashboard.book import Book

State = Literal["growing", "interrupted", "finished", "trouble"]

LEAST_SECONDS, MOST_SHARE = 0.5, 0.05
"""Least seconds between two looks at a run, and the most of the time that looking takes. So the longer a run takes to
read on, the more rarely that is done, and the work of following it grows as its time does."""
RATE_SECONDS = 10.0
"""The rate is that of the newest parts that took this long together."""


@dataclass(frozen=True)
class TokensSoFar:
    """Counts the tokens of a run that is recorded to disk."""

    num_tokens: int
    most_tokens: int
    """What the run has if no other request stops before its max_new_tokens."""
    can_stop: bool
    """Whether a request that has not ended can stop before its max_new_tokens."""
    tokens_per_second: float | None
    """Of the newest parts; None if the journal does not say how long they took."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last token at that rate, the most it can be if requests can stop early; None without a
        rate."""
        rate = self.tokens_per_second
        return (self.most_tokens - self.num_tokens) / rate if rate else None


def progress_of(journal: Journal) -> TokensSoFar:
    """Returns the TokensSoFar of a run from its journal."""
    counts = {request_id: len(token_ids) for request_id, token_ids in journal.tokens.items()}
    ended = {int(request_id) for request_id in journal.gathered("finish")}
    open_requests = [request for request in journal.header["requests"] if request["request_id"] not in ended]
    left = sum(r["sampling"]["max_new_tokens"] - counts[r["request_id"]] for r in open_requests)
    can_stop = any(r["sampling"]["stop_token_ids"] or r["sampling"]["stop"] for r in open_requests)
    tokens, seconds = 0, 0.0
    for part in reversed(journal.parts):
        if seconds >= RATE_SECONDS or "seconds" not in part:
            break
        seconds += part["seconds"]
        tokens += sum(map(len, part["committed"].values()))
    total = sum(counts.values())
    return TokensSoFar(total, total + left, can_stop, tokens / seconds if seconds else None)


class Follower:
    """Holds the newest tables of one run that is recorded to disk, and reads on when it is asked to.

    Raises: TraceError, when created, for a directory without an unfinished run, or with a damaged one.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.is_finished = False
        self.writer = recorded_by(directory)
        """Name of the process that records the run; "" if none does."""
        self._trouble = self._replaced = ""
        self._lock, self._next = Lock(), 0.0
        self._run = _followed(directory)
        self._run_id = self._run.run_id
        self._book = _warmed(self._run)

    @property
    def book(self) -> Book:
        """Newest tables. Those of a run that was finished since are read now, because its parts are gone."""
        if not self.is_finished and (self.directory / MANIFEST).exists():
            self.look(at_once=True)
        return self._book

    def peek(self) -> None:
        """Looks whether a process records the run, and whether it was finished. Reads no part."""
        self.writer = recorded_by(self.directory)
        _ = self.book

    def look(self, *, at_once: bool = False) -> None:
        """Reads the parts that were written since the last look, if that was long enough ago. at_once: in any case."""
        with self._lock:
            began = time.monotonic()
            if self.is_finished or (began < self._next and not at_once):
                return
            try:
                self._look()
                self._trouble = ""
            except (TraceError, OSError, KeyError) as error:
                self._trouble = str(error)
            end = time.monotonic()
            self._next = end + max(LEAST_SECONDS, (end - began) / MOST_SHARE)

    def _look(self) -> None:
        self.writer = recorded_by(self.directory)  # before the files: if it is gone, they are as it left them
        if (self.directory / MANIFEST).exists():
            stored = StoredRun(self.directory)
            self._book, self.is_finished, run_id = _warmed(stored, self._book), True, stored.run_id
        else:
            run = self._run.read_on() or _followed(self.directory)
            if run is self._run:
                return
            run_id = run.run_id
            self._run, self._book = run, _warmed(run, self._book)
        if run_id != self._run_id:
            self._replaced = f"Another run is in {self.directory} in place of the one that was shown. "
            self._run_id = run_id

    @property
    def state(self) -> State:
        """What the page shows of the run; "trouble" if it cannot be read on."""
        if self._trouble:
            return "trouble"
        return "finished" if self.is_finished else "growing" if self.writer else "interrupted"

    def says(self) -> JsonDict:
        """Returns what the page says of the run, as a dict: version (of the newest tables), state, says (sentences),
        command (that continues it, or ""), share (of the tokens that it can have)."""
        state, at, book = self.state, progress_of(self._run.journal), self._book
        says = {
            "growing": lambda: _growing(self.writer, at),
            "interrupted": lambda: f"Interrupted: {_tokens(at)}, and no process records it. To continue it:",
            "finished": lambda: f"The run has finished, with {_count(book):,} tokens.",
            "trouble": lambda: f"{self._trouble}. The page shows what was read before.",
        }[state]()
        return {
            "version": book.run.version,
            "state": state,
            "says": self._replaced + says,
            "command": _command(self._run.journal, self.directory) if state == "interrupted" else "",
            "share": 1.0 if self.is_finished else at.num_tokens / max(at.most_tokens, 1),
        }


def _followed(directory: Path) -> GrowingRun:
    """Returns the unfinished run in a directory. Raises: TraceError if there is none."""
    if not (directory / JOURNAL).exists():
        raise TraceError(f"{directory} holds no run any more: it was deleted or moved")
    return growing_run(directory)


def _warmed(run: StoredRun, before: Book | None = None) -> Book:
    """Returns the Book of a run, with what every page needs of the whole run: so `look` counts the time of it. before:
    the Book up to an earlier part."""
    book = Book(run, before)
    book.warm()
    return book


def _growing(writer: str, at: TokensSoFar) -> str:
    begin = f"Recorded now by {writer}: {_tokens(at)}"
    if at.num_tokens == at.most_tokens:
        return f"{begin}; its tables are being written."
    if at.tokens_per_second is None:
        return f"{begin}."
    if not at.tokens_per_second:
        return f"{begin}, none in the last {RATE_SECONDS:.0f} s."
    rate, most = at.tokens_per_second, "at most " if at.can_stop else ""
    digits = 0 if rate >= 100 else 1 if rate >= 1 else 3
    return f"{begin}, {rate:,.{digits}f} tokens a second, {most}{duration(at.seconds_left or 0.0)} left."


def _tokens(at: TokensSoFar) -> str:
    most = f"{'at most ' if at.can_stop else ''}{at.most_tokens:,}"
    return f"{at.num_tokens:,} of {most} tokens" if at.num_tokens else f"no token of {most} is on the disk yet"


def _count(book: Book) -> int:
    return sum(len(request["committed_token_ids"]) for request in book.run.requests)


def _command(journal: Journal, directory: Path) -> str:
    """Returns the command, or the call, that continues an interrupted run."""
    meta = journal.header["meta"]
    if meta.get("command", {}).get("settings") is None and (meta["drafter"] or meta.get("interventions")):
        return f'cp.resume("{directory}", model, ...)'
    return f"cacheprobe resume {directory}"
