"""Defines observers of a run: Tee forwards its events, ProgressBar counts tokens. Also handles
Ctrl-C: asks the requests to end; `cp.run` then raises Interrupted, which holds the Trace."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from cacheprobe.core.records import Observer
from cacheprobe.core.terminal import Progress
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.trace.trace import Trace

_EVENTS = [name for name in vars(Observer) if not name.startswith("_")]


class Tee(Observer):
    """Forwards every event of a run to each of several observers, in their order."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers
        for name in _EVENTS:
            setattr(self, name, _all([getattr(observer, name) for observer in observers]))


def _all(calls: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Returns a function that passes its arguments to each function of `calls`, in order."""

    def each(*args: object) -> None:
        """Calls each function of `calls` with these arguments."""
        for call in calls:
            call(*args)

    return each


class ProgressBar(Progress, Observer):
    """Shows a bar with the committed tokens, tokens per second and time left.

    total_tokens: number of tokens that are committed if no request ends early.  done: tokens committed before.
    """

    def __init__(self, total_tokens: int, enabled: bool = True, done: int = 0) -> None:
        super().__init__(total_tokens, "generating", "tokens", enabled=enabled, done=done)

    def on_commit(self, request_id: int, step: int, start: int, token_ids: Sequence[int], roles: Sequence[str]) -> None:
        """Advances the bar by the number of committed tokens."""
        self.advance(len(token_ids))


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C stopped a run. `trace` is the run's Trace; requests that had not finished are "cancelled".
    `directory` is where it is on the disk, None if it is not: out, or out-stopped if `out` holds a run that the stopped
    one was to replace."""

    def __init__(self, trace: Trace, directory: Path | None = None) -> None:
        ends = list(trace.meta["finish"].values())
        self.trace, self.directory = trace, directory
        self.num_cancelled = ends.count("cancelled")
        super().__init__(
            f"stopped by Ctrl-C: {len(ends) - self.num_cancelled} of {len(ends)} requests finished, "
            f"{self.num_cancelled} cancelled; this exception's .trace holds them"
        )


@contextmanager
def cancelling(states: Sequence[SequenceState], prints_note: bool) -> Iterator[threading.Event]:
    """Inside the `with`, the first Ctrl-C asks these requests to end at the next round of the run. Yields an Event that
    it sets.

    A second Ctrl-C raises KeyboardInterrupt. prints_note: print a note on stderr at the first one.
    Has no effect in other threads than the main one, or if the program has its own Ctrl-C handler.
    """
    stop = threading.Event()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield stop
        return

    def cancel(number: int, frame: FrameType | None) -> None:
        """Handles the first Ctrl-C: asks all requests to end. The next Ctrl-C raises KeyboardInterrupt."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()
        for state in states:
            state.is_cancel_requested = True
        if prints_note:
            with suppress(RuntimeError):  # the signal came while stderr was being written
                print("\nstopping after this pass; Ctrl-C again ends at once", file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
