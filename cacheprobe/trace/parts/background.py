"""Runs jobs that write files in a thread of their own, while the model runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class Background:
    """Runs jobs one after the other, in the order in which they were added. After a job that failed, no job runs.

    Used in a `with` block, whose end waits for the jobs.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "cacheprobe-files")
        self._newest: Future[None] | None = None

    def add(self, job: Callable[[], object]) -> None:
        """Adds a job. Raises: the error of an earlier job, if one has failed already."""
        if self.is_idle:
            self.wait()
        self._newest = self._thread.submit(_run_after, self._newest, job)

    @property
    def is_idle(self) -> bool:
        """True if every job has run, or one has failed."""
        return self._newest is None or self._newest.done()

    def wait(self) -> None:
        """Waits until every job has run. Raises: the error of the first that failed."""
        if self._newest is not None:
            self._newest.result()

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _place: TracebackType | None) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()


def _run_after(earlier: Future[None] | None, job: Callable[[], object]) -> None:
    """Runs a job, unless the one before has failed: then raises its error."""
    if earlier is not None:
        earlier.result()
    job()
