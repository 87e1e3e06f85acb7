"""Defines Background, which runs jobs one after the other in a thread of its own."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType


class Background:
    """Runs jobs one after the other, in the order in which they were added. After a job that failed, no job runs.

    Used in a `with` block, whose end waits for the jobs; after Ctrl-C only for the one that runs, and the others are
    dropped.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._num_left = 0
        self._is_dropped = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, job: Callable[[], object]) -> None:
        """Adds a job. Raises: the error of an earlier job, if one has failed already."""
        self._require_success()
        if self._thread is None:  # a daemon: a stream that nobody ends does not keep the process alive
            self._thread = threading.Thread(target=self._work, name="cacheprobe-files", daemon=True)
            self._thread.start()
        with self._changed:
            self._num_left += 1
        self._jobs.put(job)

    @property
    def is_idle(self) -> bool:
        """True if every job has run, or one has failed."""
        return not self._num_left or self._error is not None

    def wait(self) -> None:
        """Waits until every job has run. Raises: the error of the first that failed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_left)
        self._require_success()

    def __enter__(self) -> "Background":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _place: TracebackType | None
    ) -> None:
        is_own_thread = self._thread is threading.current_thread()  # the garbage collector closes a stream there
        self._is_dropped |= is_own_thread or (kind is not None and issubclass(kind, KeyboardInterrupt))
        self._jobs.put(None)
        pressed = None if is_own_thread else self._wait_for_the_end()
        if self._error is not None and (kind is None or kind is GeneratorExit):
            raise self._error
        if self._error is not None and error is not None and error is not self._error:
            error.add_note(f"what was recorded was not all written: {self._error}")
        if pressed is not None and kind is None:
            raise pressed

    def _wait_for_the_end(self) -> KeyboardInterrupt | None:
        """Waits until no job runs. Ctrl-C drops the jobs that have not begun, but does not end the waiting: nobody else
        may write the run before. Returns the exception of Ctrl-C; None if it was not pressed."""
        pressed = None
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._num_left)
                return pressed
            except KeyboardInterrupt as again:
                pressed, self._is_dropped = again, True

    def _require_success(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """Takes jobs until there is None."""
        while (job := self._jobs.get()) is not None:
            if self._error is None and not self._is_dropped:
                try:
                    job()
                except BaseException as error:
                    self._error = error
            del job  # with the tensors of its part
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()
