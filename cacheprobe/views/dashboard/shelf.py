"""Lists what the command line named: stored runs, with the reason if a run cannot be opened, and result files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cacheprobe.core.values import JsonDict
from cacheprobe.sweeps.store import PLAN, SHARDS
from cacheprobe.trace.manifest import JOURNAL, MANIFEST, TraceError
from cacheprobe.trace.stored import StoredRun
from cacheprobe.views.dashboard.book import Book
from cacheprobe.views.dashboard.growth import Follower

MOST_CELLS = 200
"""Largest number of a sweep's cells in the menu of runs."""


class CannotShow(ValueError):
    """Raised if a view cannot be shown, for example because the run lacks the data. The message is shown on the
    page."""


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Holds the name of a stored run, and the run's `Book` (its tables, read and cached), or the reason why the run
    cannot be opened."""

    name: str
    stored: Book | None
    reason: str = ""
    follower: Follower | None = None
    """Reads a run that was not finished when the dashboard opened it; None for any other."""

    @property
    def book(self) -> Book | None:
        """Newest tables of the run; None if it cannot be opened."""
        return self.stored if self.follower is None else self.follower.book

    @property
    def label(self) -> str:
        """Name of the run in the menu of runs, and whether it grows, was interrupted or cannot be opened."""
        if self.book is None:
            return f"{self.name} (cannot be opened)"
        if self.follower is None or self.follower.is_finished:
            return self.name
        return f"{self.name} ({'growing' if self.follower.writer else 'interrupted'})"


@dataclass(frozen=True)
class Shelf:
    """Holds the runs and result files that the command line named. A question of the page names each by a number, never
    by a path."""

    entries: tuple[OpenRun, ...]
    results: tuple[Path, ...] = ()
    model: str | None = None
    """Name or directory of the model that the command line gives; it is loaded instead of the model that a run
    names."""
    lenses: tuple[Path, ...] = field(default=())
    """Directories of tuned lenses."""
    more: tuple[Path, ...] = ()
    """Directories of sweep cells after the first 200 of a sweep, which are not in the menu of runs. Their run numbers
    follow those of `entries`. A directory is opened at its first use."""

    @classmethod
    def of(cls, paths: Iterable[Path], model: str | None = None, lenses: Sequence[Path] = ()) -> "Shelf":
        """Returns a `Shelf` of these paths. A directory is a run, a sweep, or a folder of runs and result files; a
        .json file is a result. A sweep gives one result, and its cells as runs: the first 200 in `entries`, the others
        in `more`."""
        entries: list[OpenRun] = []
        results: list[Path] = []
        more: list[Path] = []
        for path in paths:
            _sort_in(path, entries, results, more)
        return cls(tuple(entries), tuple(results), model, tuple(lenses), tuple(more))

    def book(self, number: object) -> Book:
        """Returns the `Book` (tables, read and cached) of the run with this number. Raises: CannotShow for another
        number, or for a run that cannot be opened."""
        index = whole(number, "run", len(self.entries) + len(self.more))
        num_listed = len(self.entries)
        entry = self.entries[index] if index < num_listed else _open_cached(self.more[index - num_listed])
        if entry.book is None:
            raise CannotShow(f"{entry.name} cannot be opened: {entry.reason}")
        return entry.book

    def book_and_request(self, question: JsonDict) -> tuple[Book, int]:
        """Returns (Book of the run, request id) that a question of the page names. Raises: CannotShow if the run cannot
        be opened, or if the run or the request does not exist."""
        book = self.book(question["run"])
        return book, whole(question["request"], "request", len(book.run.requests))

    def follower(self, number: object) -> Follower | None:
        """Returns what reads the run with this number on; None for a run that was finished when it was opened."""
        index = whole(number, "run", len(self.entries) + len(self.more))
        return self.entries[index].follower if index < len(self.entries) else None

    def numbers(self) -> dict[str, int]:
        """Returns a dict from the name of a run's directory to the run's number; of runs with equal names, the last
        counts."""
        names = [*(entry.name for entry in self.entries), *(path.name for path in self.more)]
        return {name: number for number, name in enumerate(names)}

    @property
    def first(self) -> int:
        """Number of the first run that can be opened; 0 if no run can be opened."""
        return next((i for i, entry in enumerate(self.entries) if entry.book is not None), 0)


def whole(value: object, what: str, count: int) -> int:
    """Returns `value` if it is a whole number from 0 to count - 1. what: the name of the value in the error.
    Raises: CannotShow for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise CannotShow(f"there is no {what} {value!r:.40}; there are {count}, counted from 0")
    return value


def _sort_in(path: Path, entries: list[OpenRun], results: list[Path], more: list[Path]) -> None:
    """Adds a path of the command line to `entries` (runs), `results` (files) and `more` (later cells of a sweep), in
    place."""
    if path.is_file() and path.suffix == ".json":
        results.append(path)
        return
    content = sorted(path.iterdir()) if path.is_dir() and not _is_run(path) else []
    if (path / PLAN).exists():  # a sweep: its results in one tab, its first cells among the runs
        results.append(path / PLAN)
        shards = [manifest.parent for manifest in sorted((path / SHARDS).glob(f"*/{MANIFEST}"))]
        entries += [_open(shard) for shard in shards[:MOST_CELLS]]
        more += shards[MOST_CELLS:]
        return
    runs = [p for p in content if p.is_dir() and (_is_run(p) or any(p.glob("rows-*.parquet")))]
    files = [p for p in content if p.is_file() and p.suffix == ".json"]
    results += files
    if runs or files:
        entries += [_open(p) for p in runs]
    else:
        entries.append(_open(path))


def _is_run(path: Path) -> bool:
    return (path / MANIFEST).exists() or (path / JOURNAL).exists()


@lru_cache(maxsize=32)
def _open_cached(path: Path) -> OpenRun:
    return _open(path)


def _open(path: Path) -> OpenRun:
    """Returns an `OpenRun` of a run's directory, with the reason if the run cannot be opened."""
    try:
        if (path / JOURNAL).exists() and not (path / MANIFEST).exists():
            return OpenRun(path.name, None, follower=Follower(path))
        return OpenRun(path.name, Book(StoredRun(path)))
    except (TraceError, OSError, KeyError, TypeError) as error:
        reason = f"its manifest lacks {error}" if isinstance(error, KeyError) else str(error)
        return OpenRun(path.name, None, reason)
