"""Looks for edits that flip a verdict in the background, one search at a time."""

from collections.abc import Callable, Hashable
from threading import Lock, Thread
from typing import TYPE_CHECKING

from cacheprobe.views.dashboard.questions import message_of

if TYPE_CHECKING:
    from cacheprobe.analysis.flips import Flips

Search = Callable[[Callable[[int, int], None]], "Flips"]
"""Looks for the edits; calls its argument with (finished edits, all edits)."""
MOST_KEPT = 16
"""Number of jobs that are kept."""


class _Cancelled(Exception):
    """Ends a search that was cancelled."""


class FlipJob:
    """Runs one search in a thread, and holds how far it is, and its result or the reason why it has none."""

    def __init__(self, search: Search) -> None:
        self.done = self.total = 0
        self.found: Flips | None = None
        self.error = ""
        self.is_cancelled = False
        """The search ends after the edits that it runs now."""
        Thread(target=self._run, args=(search,), daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether the search has no result and no error, and was not cancelled."""
        return self.found is None and not self.error and not self.is_cancelled

    def _run(self, search: Search) -> None:
        try:
            self.found = search(self._progress)
        except _Cancelled:
            pass
        except Exception as error:
            self.error = message_of(error)

    def _progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if self.is_cancelled:
            raise _Cancelled


class FlipJobs:
    """Keeps jobs by key. Only one runs at a time: a new one cancels the one before."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, FlipJob] = {}
        self._lock = Lock()

    def start(self, key: Hashable, search: Search) -> FlipJob:
        """Returns the job of this key, which runs or has its result; starts it if there is none, or after an error or a
        cancellation."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or not (job.is_running or job.found is not None):
                for other in self._jobs.values():
                    other.is_cancelled = other.found is None
                job = self._jobs[key] = FlipJob(search)
                while len(self._jobs) > MOST_KEPT:
                    self._jobs.pop(next(iter(self._jobs)))
            return job

    def look(self, key: Hashable) -> FlipJob | None:
        """Returns the job of this key; None if there is none."""
        return self._jobs.get(key)
