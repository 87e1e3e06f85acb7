"""Lists what the command line named: runs, runs that cannot be opened with the reason, and stored results."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cacheprobe.core.values import JsonDict
from cacheprobe.dashboard.book import Book
from cacheprobe.sweeps.storage.store import PLAN, SHARDS
from cacheprobe.trace.manifest import MANIFEST, TraceError
from cacheprobe.trace.stored import StoredRun

MOST_CELLS = 200
"""Largest number of a sweep's cells in the menu of runs."""


class CannotShow(ValueError):
    """Raised for a question that cannot be answered: something that the command line did not name, or data that the run
    lacks.
    """


@dataclass(frozen=True, slots=True)
class Entry:
    """A run, or the reason why it cannot be opened."""

    name: str
    book: Book | None
    reason: str = ""


@dataclass(frozen=True)
class Shelf:
    """Runs and results, each known to the browser by a number only: no path comes from a browser."""

    entries: tuple[Entry, ...]
    results: tuple[Path, ...] = ()
    model: str | None = None
    """Model of the command line, which reads states if a run's own model cannot be loaded."""
    lenses: tuple[Path, ...] = field(default=())
    """Directories of tuned lenses."""
    more: tuple[Path, ...] = ()
    """Cells of sweeps beyond those in the menu of runs. Their numbers follow the entries'; each is opened at its first
    use."""

    @classmethod
    def of(cls, paths: Iterable[Path], model: str | None = None, lenses: Sequence[Path] = ()) -> "Shelf":
        """Returns the shelf of these paths: a directory is a run, or holds runs and result files; a .json file is a
        result.
        """
        entries: list[Entry] = []
        results: list[Path] = []
        more: list[Path] = []
        for path in paths:
            _place(path, entries, results, more)
        return cls(tuple(entries), tuple(results), model, tuple(lenses), tuple(more))

    def book(self, number: object) -> Book:
        """Returns the run of this number. Raises: CannotShow for another number, or for a run that cannot be opened."""
        place = whole(number, "run", len(self.entries) + len(self.more))
        count = len(self.entries)
        entry = self.entries[place] if place < count else _opened(self.more[place - count])
        if entry.book is None:
            raise CannotShow(f"{entry.name} cannot be opened: {entry.reason}")
        return entry.book

    def book_and_request(self, question: JsonDict) -> tuple[Book, int]:
        """Returns the run and the request that a question names. Raises: CannotShow if there is none."""
        book = self.book(question["run"])
        return book, whole(question["request"], "request", len(book.run.requests))

    def numbers(self) -> dict[str, int]:
        """Returns the number of every run, by the name of its directory."""
        names = [*(entry.name for entry in self.entries), *(path.name for path in self.more)]
        return {name: number for number, name in enumerate(names)}

    @property
    def first(self) -> int:
        """Number of the first run that can be opened, or 0."""
        return next((i for i, entry in enumerate(self.entries) if entry.book is not None), 0)


def whole(value: object, what: str, count: int) -> int:
    """Returns `value` as a number from 0 to count - 1. Raises: CannotShow for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise CannotShow(f"there is no {what} {value!r:.40}; there are {count}, counted from 0")
    return value


def _place(path: Path, entries: list[Entry], results: list[Path], more: list[Path]) -> None:
    if path.is_file() and path.suffix == ".json":
        results.append(path)
        return
    inside = sorted(path.iterdir()) if path.is_dir() and not (path / MANIFEST).exists() else []
    if (path / PLAN).exists():  # a sweep: its results in one tab, its first cells among the runs
        results.append(path / PLAN)
        shards = [manifest.parent for manifest in sorted((path / SHARDS).glob(f"*/{MANIFEST}"))]
        entries += [_entry(shard) for shard in shards[:MOST_CELLS]]
        more += shards[MOST_CELLS:]
        return
    runs = [p for p in inside if p.is_dir() and ((p / MANIFEST).exists() or any(p.glob("rows-*.parquet")))]
    files = [p for p in inside if p.is_file() and p.suffix == ".json"]
    results += files
    if runs or files:
        entries += [_entry(p) for p in runs]
    else:
        entries.append(_entry(path))


@lru_cache(maxsize=32)
def _opened(path: Path) -> Entry:
    return _entry(path)


def _entry(path: Path) -> Entry:
    try:
        return Entry(path.name, Book(StoredRun(path)))
    except (TraceError, OSError, KeyError, TypeError) as error:
        said = f"its manifest lacks {error}" if isinstance(error, KeyError) else str(error)
        return Entry(path.name, None, said)
