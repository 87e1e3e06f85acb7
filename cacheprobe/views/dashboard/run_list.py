"""Lists what the command line named: stored runs, with the reason if a run cannot be opened, runs that are recorded
meanwhile, and result files."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from cacheprobe.core.terminal import duration
from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.store import PLAN, SHARDS
from cacheprobe.trace.manifest import JOURNAL, MANIFEST, TraceError
from cacheprobe.trace.places import recorded_by
from cacheprobe.trace.stored import StoredRun, growing_run
from cacheprobe.views.dashboard.flip_jobs import FlipJobs
from cacheprobe.views.dashboard.questions import CannotShow, PageQuestion, whole
from cacheprobe.views.dashboard.reader import RunReader
from cacheprobe.views.dashboard.run_tables import RunTables

if TYPE_CHECKING:
    from cacheprobe.trace.journal import Journal
    from cacheprobe.trace.stored import GrowingRun


LEAST_SECONDS, MOST_SHARE = 0.5, 0.05
"""Least seconds between two looks at a run, and the most of the time that looking takes. So the longer a run takes to
read on, the more rarely that is done, and the work of following it grows as its time does."""
RATE_SECONDS = 10.0
"""The rate is that of the newest parts that took this long together."""


class TokensSoFar(NamedTuple):
    """Holds the progress of a run that is recorded to disk: its tokens so far, the most it can have, and its rate."""

    num_tokens: int
    most_tokens: int
    """What the run has if no other request stops before its max_new_tokens."""
    can_stop: bool
    """Whether a request that has not ended can stop before its max_new_tokens."""
    tokens_per_second: float | None
    """Of the newest parts; None if the journal does not say how long they took."""

    def __str__(self) -> str:
        most = f"{'at most ' if self.can_stop else ''}{self.most_tokens:,}"
        return f"{self.num_tokens:,} of {most} tokens" if self.num_tokens else f"no token of {most} is on the disk yet"

    def time_left(self) -> str:
        """Returns text on the rate and the time until the last token, the most it can be if requests can stop early."""
        rate = self.tokens_per_second
        if self.num_tokens == self.most_tokens:
            return "; its tables are being written."
        if not rate:
            return "." if rate is None else f", none in the last {RATE_SECONDS:.0f} s."
        digits, most = 0 if rate >= 100 else 1 if rate >= 1 else 3, "at most " if self.can_stop else ""
        left = duration((self.most_tokens - self.num_tokens) / rate)
        return f", {rate:,.{digits}f} tokens a second, {most}{left} left."


def progress_of(journal: "Journal") -> TokensSoFar:
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
        self._tables = _warmed(self._run)

    @property
    def tables(self) -> RunTables:
        """Newest tables. Those of a run that was finished since are read now, because its parts are gone."""
        if not self.is_finished and (self.directory / MANIFEST).exists():
            self.look(at_once=True)
        return self._tables

    def peek(self) -> None:
        """Looks whether a process records the run, and whether it was finished. Reads no part."""
        self.writer = recorded_by(self.directory)
        _ = self.tables

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
            self._tables, self.is_finished, run_id = _warmed(stored), True, stored.run_id
        else:
            run = self._run.read_on() or _followed(self.directory)
            if run is self._run:
                return
            run_id = run.run_id
            self._run, self._tables = run, _warmed(run)
        if run_id != self._run_id:
            self._replaced = f"Another run is in {self.directory} in place of the one that was shown. "
            self._run_id = run_id

    def says(self) -> JsonDict:
        """Returns what the page says of the run, as a dict: version (of the newest tables), state ("trouble" if the run
        cannot be read on, "finished", "growing" or "interrupted"), says (sentences), command (that continues it, or
        ""), share (of the tokens that it can have)."""
        at, run, command = progress_of(self._run.journal), self._tables.run, ""
        share = 1.0 if self.is_finished else at.num_tokens / max(at.most_tokens, 1)
        if self._trouble:
            state, says = "trouble", f"{self._trouble}. The page shows what was read before."
        elif self.is_finished:
            count = sum(len(request["committed_token_ids"]) for request in run.requests)
            state, says = "finished", f"The run has finished, with {count:,} tokens."
        elif self.writer:
            state, says = "growing", f"Recorded now by {self.writer}: {at}{at.time_left()}"
        else:
            state, says = "interrupted", f"Interrupted: {at}, and no process records it. To continue it:"
            command = _command(self._run.journal, self.directory)
        says = self._replaced + says
        return {"version": run.version, "state": state, "says": says, "command": command, "share": share}


def _followed(directory: Path) -> "GrowingRun":
    """Returns the unfinished run in a directory. Raises: TraceError if there is none."""
    if not (directory / JOURNAL).exists():
        raise TraceError(f"{directory} holds no run any more: it was deleted or moved")
    return growing_run(directory)


def _warmed(run: StoredRun) -> RunTables:
    """Returns the RunTables of a run, with what every page needs of the whole run: so `look` counts the time of it."""
    tables = RunTables(run)
    tables.warm()
    return tables


def _command(journal: "Journal", directory: Path) -> str:
    """Returns the command, or the call, that continues an interrupted run."""
    meta = journal.header["meta"]
    if meta.get("command", {}).get("settings") is None and (meta["drafter"] or meta.get("interventions")):
        return f'cp.resume("{directory}", model, ...)'
    return f"cacheprobe resume {directory}"


MOST_CELLS = 200
"""Largest number of a sweep's cells in the menu of runs."""


class OpenRun:
    """Names a stored run, which is opened at its first use, or holds the reason why it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @cached_property
    def _opened(self) -> tuple[RunTables | None, Follower | None, str]:
        """(tables, what reads an unfinished run on, reason why the run cannot be opened); two are None or ""."""
        try:
            if (self.path / JOURNAL).exists() and not (self.path / MANIFEST).exists():
                return None, Follower(self.path), ""
            return RunTables(StoredRun(self.path)), None, ""
        except (TraceError, OSError, KeyError, TypeError) as error:
            return None, None, f"its manifest lacks {error}" if isinstance(error, KeyError) else str(error)

    @property
    def follower(self) -> Follower | None:
        """Reads a run that was not finished when the dashboard opened it; None for any other."""
        return self._opened[1]

    @property
    def reason(self) -> str:
        """Why the run cannot be opened; "" if it can."""
        return self._opened[2]

    @property
    def tables(self) -> RunTables | None:
        """Newest tables of the run; None if it cannot be opened."""
        return self._opened[0] if self.follower is None else self.follower.tables

    @property
    def label(self) -> str:
        """Name of the run in the menu of runs, and whether it grows, was interrupted or cannot be opened."""
        if self.tables is None:
            return f"{self.name} (cannot be opened)"
        if self.follower is None or self.follower.is_finished:
            return self.name
        return f"{self.name} ({'growing' if self.follower.writer else 'interrupted'})"


@dataclass(frozen=True)
class RunList:
    """Holds the runs and result files that the command line named. A question of the page names each by a number, never
    by a path."""

    entries: tuple[OpenRun, ...]
    """Runs in the menu."""
    results: tuple[Path, ...] = ()
    model: str | None = None
    """Name or directory of the model that the command line gives; it is loaded instead of the model that a run
    names."""
    lenses: tuple[Path, ...] = ()
    """Directories of tuned lenses."""
    more: tuple[OpenRun, ...] = ()
    """Cells after the first 200 of a sweep, which are not in the menu. Their run numbers follow those of `entries`."""

    @cached_property
    def reader(self) -> RunReader:
        """Reads kept states through a lens."""
        return RunReader(self.model, self.lenses)

    @cached_property
    def jobs(self) -> FlipJobs:
        """Searches for edits that flip a verdict."""
        return FlipJobs()

    @classmethod
    def of(cls, paths: Iterable[Path], model: str | None = None, lenses: Sequence[Path] = ()) -> "RunList":
        """Returns a `RunList` of these paths. A directory is a run, a sweep, or a folder of runs and result files; a
        .json file is a result. A sweep gives one result, and its cells as runs: the first 200 in `entries`, the others
        in `more`."""
        entries: list[Path] = []
        results: list[Path] = []
        more: list[Path] = []
        for path in paths:
            content = sorted(path.iterdir()) if path.is_dir() and not _is_run(path) else []
            if path.is_file() and path.suffix == ".json":
                results.append(path)
            elif (path / PLAN).exists():  # a sweep: its results in one tab, its first cells among the runs
                results.append(path / PLAN)
                shards = [manifest.parent for manifest in sorted((path / SHARDS).glob(f"*/{MANIFEST}"))]
                entries += shards[:MOST_CELLS]
                more += shards[MOST_CELLS:]
            else:
                runs = [p for p in content if p.is_dir() and (_is_run(p) or any(p.glob("rows-*.parquet")))]
                files = [p for p in content if p.is_file() and p.suffix == ".json"]
                results += files
                entries += runs if runs or files else [path]
        listed, others = (tuple(map(OpenRun, of)) for of in (entries, more))
        return cls(listed, tuple(results), model, tuple(lenses), others)

    def _entry(self, number: object) -> OpenRun:
        """Returns the run with this number. Raises: CannotShow for another number."""
        runs = (*self.entries, *self.more)
        return runs[whole(number, "run", len(runs))]

    def tables(self, number: object) -> RunTables:
        """Returns the `RunTables` (tables, read and cached) of the run with this number. Raises: CannotShow for another
        number, or for a run that cannot be opened."""
        entry = self._entry(number)
        if entry.tables is None:
            raise CannotShow(f"{entry.name} cannot be opened: {entry.reason}")
        return entry.tables

    def tables_and_request(self, question: PageQuestion) -> tuple[RunTables, int]:
        """Returns (RunTables of the run, request id) that a question of the page names. Raises: CannotShow if the run
        cannot be opened, or if the run or the request does not exist."""
        tables = self.tables(question["run"])
        return tables, whole(question["request"], "request", len(tables.run.requests))

    def follower(self, number: object) -> Follower | None:
        """Returns what reads the run with this number on; None for a run that was finished when it was opened."""
        return self._entry(number).follower

    def numbers(self) -> dict[str, int]:
        """Returns a dict from the name of a run's directory to the run's number; of runs with equal names, the last
        counts."""
        return {entry.name: number for number, entry in enumerate((*self.entries, *self.more))}

    @property
    def first(self) -> int:
        """Number of the first run that can be opened; 0 if no run can be opened."""
        return next((i for i, entry in enumerate(self.entries) if entry.tables is not None), 0)


def _is_run(path: Path) -> bool:
    return (path / MANIFEST).exists() or (path / JOURNAL).exists()
