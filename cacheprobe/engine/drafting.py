"""Calls a drafter, checks its result, and abandons a call that does not return.

A user's own drafter runs in a thread of its own, because nothing else leaves the run alive beside a call that never
returns: a watchdog can raise an exception in a Python loop, but not in a C call, and a signal reaches only the main
thread. What the drafter asks of the engine (passes of the model, choices) is sent back and done in the run's own
thread, one thing at a time. So every pass has the thread, and with it the OpenMP team, the autocast and inference mode
and the hooks, that it would have without the other thread; and a call that was given up can touch neither the model nor
the cache any more. Only its own code goes on: a Python loop is ended by an exception, and a C call is left behind in a
daemon thread. A C call that holds the interpreter's lock for ever is the one case that no thread can outlive.

cacheprobe's own drafters run no code of the user's, and are called directly. So is one with deadline_seconds = None,
such as one that holds a connection that belongs to its thread.
"""

import contextvars
import ctypes
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from cacheprobe.core.values import whole_number
from cacheprobe.drafters.base import DraftContext, Drafter, deadline_seconds
from cacheprobe.drafters.scripted import Scripted
from cacheprobe.engine.model_runner import EngineError
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.turns import computing

MOST_GIVEN_UP = 8
"""Calls of one run that may run out of time; the drafter is then not called again. Each one leaves a thread behind."""
_LITTLE_SECONDS = 0.002
"""Of the processor's time: a thread that only waits takes less of it in a tenth of a second."""
_PASSES_COUNT = 10
"""Deadlines that a call may take in all, the passes that it asks for included."""


class DrafterCalls:
    """Makes the calls of one run to its drafter."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._thread: _Thread | None = None
        self._num_given_up = 0

    @property
    def name(self) -> str:
        """Returns the drafter's name, "fast_path" if there is none."""
        return "fast_path" if self._drafter is None else self._drafter.name

    def extend(
        self, context: DraftContext, states: Sequence[SequenceState], step: int, most: int
    ) -> list[tuple[int, ...]]:
        """Returns the drafter's next candidates of each request, at most `most`.

        Raises: EngineError naming requests and step where the drafter raises, returns anything else, or does not
        return.
        """
        drafter = self._drafter
        assert drafter is not None
        numbers = ", ".join(str(state.request_id) for state in states)
        where = f"request{'s' * (len(states) > 1)} {numbers} step {step}: drafter {drafter.name}"
        try:
            return self._run(
                drafter,
                lambda lent: _checked(drafter.extend(lent, states), states, most, step, drafter.name),
                context,
            )
        except EngineError:
            raise
        except _OutOfTimeError as error:
            raise EngineError(f"{where} {error}") from error
        except Exception as error:  # a user's own code: whatever it raises concerns these requests alone
            raise EngineError(f"{where} failed with {type(error).__name__}: {error!s:.200}") from error

    def release(self, state: SequenceState) -> None:
        """Calls the drafter's `release` for a request that left its cache place. A failure is only a warning: no token
        is lost."""
        drafter = self._drafter
        if drafter is None or self._num_given_up >= MOST_GIVEN_UP:
            return
        try:
            self._run(drafter, lambda _: drafter.release(state))
        except Exception as error:
            said = str(error) if isinstance(error, _OutOfTimeError) else f"failed with {type(error).__name__}: {error}"
            warnings.warn(
                f"request {state.request_id}: drafter {drafter.name} {said:.200}, in release",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Ends the drafter's thread at the end of a run."""
        if self._thread is not None:
            self._thread.jobs.put(None)
            self._thread = None

    def _run(self, drafter: Drafter, job: "Callable[[Any], Any]", context: DraftContext | None = None) -> Any:
        seconds = deadline_seconds(drafter)
        if seconds is None or is_own(drafter):
            return job(context)
        if self._num_given_up >= MOST_GIVEN_UP:
            raise _OutOfTimeError(
                f"did not return from {MOST_GIVEN_UP} calls within {seconds:g} s each, and is not called again"
            )
        if self._thread is None:
            self._thread = _Thread()
        try:
            return self._thread.run(job, context, seconds)
        except (_OutOfTimeError, KeyboardInterrupt) as error:
            self._thread.give_up()
            self._thread = None
            self._num_given_up += isinstance(error, _OutOfTimeError)
            raise


def is_own(drafter: Any) -> bool:
    """Returns whether a drafter is cacheprobe's own and runs no function or lens of the user."""
    parts = [drafter, *([lens] if (lens := getattr(drafter, "lens", None)) is not None else [])]
    return not isinstance(drafter, Scripted) and all(type(p).__module__.split(".")[0] == "cacheprobe" for p in parts)


def _checked(given: Any, states: Sequence[SequenceState], most: int, step: int, name: str) -> list[tuple[int, ...]]:
    """Returns a drafter's result as token ids. Raises: EngineError naming the request whose entry is something else."""
    numbers = ", ".join(str(state.request_id) for state in states)
    wanted = f"must return {len(states)} lists of token ids, one for each request"
    if not _is_list(given):
        raise EngineError(f"requests {numbers} step {step}: drafter {name} {wanted}, got {given!r:.60}")
    proposals = list(islice(given, len(states) + 1))
    if len(proposals) != len(states):
        count = len(given) if hasattr(given, "__len__") else f"{len(proposals)} or more"
        raise EngineError(f"requests {numbers} step {step}: drafter {name} {wanted}, got {count} lists")
    kept = []
    for state, token_ids in zip(states, proposals, strict=True):
        where = f"request {state.request_id} step {step}: drafter {name}"
        if not _is_list(token_ids):
            raise EngineError(f"{where} must propose a list of token ids, got {token_ids!r:.60}")
        try:
            kept.append(tuple(whole_number("a proposed token", token_id) for token_id in islice(token_ids, most)))
        except ValueError as error:
            raise EngineError(f"{where}: {error}; propose token ids") from error
    return kept


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping)


class _OutOfTimeError(Exception):
    """Says that a call did not return before its deadline."""


class _GivenUpError(BaseException):
    """Raised inside a drafter whose call was given up; no Exception, so that `except Exception` lets it through."""


class _Thread:
    """A thread that runs one job at a time, and whose questions to the engine are answered in the caller's thread."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self._said: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._is_given_up = threading.Event()
        # no reference to `self`: a run that is let go can then end at once
        self._thread = threading.Thread(
            target=_work, args=(self.jobs, self._said, self._is_given_up), name="drafter", daemon=True
        )
        self._thread.start()

    def run(self, job: "Callable[[Any], Any]", context: DraftContext | None, seconds: float) -> Any:
        """Runs a job in the thread and returns its result; the job gets a context that its thread may use.

        Raises: what the job raises; _OutOfTimeError after `seconds`, passes of the model apart.
        """
        lent = None
        if context is not None:
            lent = _Lent(context.model, self._said, self._answers, self._is_given_up)
        with computing.lent_to(self._thread.ident):  # it may run a model by itself
            self.jobs.put((_settings(), lambda: job(lent)))
            return self._wait(context, seconds)

    def _wait(self, context: DraftContext | None, seconds: float) -> Any:
        began = time.monotonic()
        until, last = began + seconds, began + _PASSES_COUNT * seconds
        while True:
            try:
                kind, value = self._said.get(timeout=max(min(until, last) - time.monotonic(), 0))
            except Empty:
                raise _OutOfTimeError(
                    f"did not return within {seconds:g} s; a slower one sets its attribute deadline_seconds"
                ) from None
            if kind == "returned":
                return value
            if kind == "raised":
                raise value
            asked = time.monotonic()
            self._answers.put(_answer(context, value))
            until += time.monotonic() - asked

    def give_up(self) -> None:
        """Abandons the thread: its further requests to the engine are refused, and a Python loop in it is ended.

        A thread that only waits gets no exception: while one is pending for a blocked thread, Python 3.11 hangs as soon
        as a profiler or a debugger is set in any other thread.
        """
        self._is_given_up.set()
        self._answers.put((None, _GivenUpError()))
        ident = self._thread.ident
        if ident is not None and _is_computing(ident):  # it lives: jobs end with the None below
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_GivenUpError))
        self.jobs.put(None)


def _is_computing(ident: int) -> bool:
    """Returns whether a living thread computes during the next tenth of a second; True if the system cannot tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return True
    clock = time.pthread_getcpuclockid(ident)
    began = time.clock_gettime(clock)
    for _ in range(10):
        time.sleep(0.01)
        if time.clock_gettime(clock) - began > _LITTLE_SECONDS:
            return True
    return False


class _Lent:
    """Implements DraftContext for the drafter's thread: passes each call to the engine's thread and waits for the
    result."""

    def __init__(self, model: Any, said: SimpleQueue, answers: SimpleQueue, is_given_up: threading.Event) -> None:
        self.model = model
        self._said, self._answers, self._is_given_up = said, answers, is_given_up

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """See DraftContext.feed_newest."""
        return self._ask("feed_newest", states, num_layers)

    def choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int] = ()) -> int:
        """See DraftContext.choose."""
        return self._ask("choose", state, logits, drafted)

    def _ask(self, name: str, *args: Any) -> Any:
        if self._is_given_up.is_set():
            raise _GivenUpError
        self._said.put(("asked", (name, args)))
        value, error = self._answers.get()
        if error is not None:
            raise error
        return value


def _answer(context: DraftContext | None, asked: tuple[str, tuple[Any, ...]]) -> tuple[Any, BaseException | None]:
    name, args = asked
    try:
        return getattr(context, name)(*args), None
    except Exception as error:  # the drafter's to see, as if it had called by itself
        return None, error


def _work(jobs: SimpleQueue, said: SimpleQueue, is_given_up: threading.Event) -> None:
    """Runs jobs until there are no more."""
    try:
        while (job := jobs.get()) is not None and not is_given_up.is_set():
            said.put(_result(*job))
            del job  # what it holds is the run's: a run that is let go ends at once
    except _GivenUpError:  # it came just after the job had returned
        pass


def _result(settings: "Callable[[ExitStack], contextvars.Context]", job: Callable[[], Any]) -> tuple[str, Any]:
    try:
        with ExitStack() as stack:
            return "returned", settings(stack).run(job)
    except BaseException as error:  # KeyboardInterrupt and SystemExit are the caller's to see, too
        return "raised", error


def _settings() -> "Callable[[ExitStack], contextvars.Context]":
    """Returns a function that enters this thread's torch settings and context variables in another thread."""
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    variables = contextvars.copy_context()

    def enter(stack: ExitStack) -> contextvars.Context:
        """Enters the settings on the stack, and returns the context variables."""
        stack.enter_context(torch.inference_mode(is_inference))
        stack.enter_context(torch.set_grad_enabled(has_grad))
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype))
        return variables

    return enter
