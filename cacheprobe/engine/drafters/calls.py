"""Calls a drafter, checks its result, and abandons a call that does not return before its deadline.

A user's drafter runs in a second thread, so that the run can go on if a call never returns. (A watchdog can raise an
exception in a Python loop, but not in a C call, and a signal reaches only the main thread.) If the drafter calls the
engine, for a pass of the model or a choice of a token, the run's own thread does the work and sends back the result.
So every pass runs in the run's thread, with its OpenMP team, autocast and inference mode, and hooks. An abandoned call
can no longer reach the model or the cache. A Python loop in it is ended by an exception; a C call stays in a daemon
thread. A C call that holds the interpreter's lock for ever blocks the run, too.

cacheprobe's own drafters are called directly, in the run's thread. So is a user's drafter with deadline_seconds = None,
for example one with a connection that only one thread may use.
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

from cacheprobe.core.records import EngineError, ObserverError
from cacheprobe.core.values import whole_number
from cacheprobe.engine.drafters.base import DraftContext, Drafter, deadline_seconds
from cacheprobe.engine.drafters.scripted import Scripted
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.settings import model_lock

MOST_ABANDONED = 8
"""Number of abandoned calls after which a run does not call the drafter again. Each may leave a thread running."""
_LITTLE_SECONDS = 0.002
"""Processor seconds; a thread that only waits uses less in a tenth of a second."""
_MAX_DEADLINES = 10
"""Maximum duration of a call, in deadlines, with the engine's work for this call included."""


class DrafterCalls:
    """Makes the calls of one run to its drafter, with their deadlines and error messages."""

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._thread: _Thread | None = None
        self._num_abandoned = 0

    @property
    def name(self) -> str:
        """The drafter's name; "fast_path" without a drafter."""
        return "fast_path" if self._drafter is None else self._drafter.name

    def extend(
        self, context: DraftContext, states: Sequence[SequenceState], step: int, max_tokens: int
    ) -> list[tuple[int, ...]]:
        """Calls the drafter once. Returns a list with one tuple of up to `max_tokens` draft token ids for each request.

        Raises: EngineError, with the requests and the step, if the drafter raises, returns no lists of token ids,
        exceeds its deadline, or has exceeded the deadline MOST_ABANDONED (8) times before.
        """
        drafter = self._drafter
        assert drafter is not None
        numbers = ", ".join(str(state.request_id) for state in states)
        where = f"request{'s' * (len(states) > 1)} {numbers} step {step}: drafter {drafter.name}"
        try:
            return self._run(
                drafter,
                lambda usable: _checked(drafter.extend(usable, states), states, max_tokens, step, drafter.name),
                context,
            )
        except (EngineError, ObserverError):
            raise
        except _OutOfTimeError as error:
            raise EngineError(f"{where} {error}") from error
        except Exception as error:  # a user's own code may raise anything; it fails these requests only
            raise EngineError(f"{where} failed with {type(error).__name__}: {error!s:.200}") from error

    def release(self, state: SequenceState) -> None:
        """Calls the drafter's `release` for a request that left its cache row. Warns if the call fails. Does nothing
        without a drafter, or if the drafter exceeded MOST_ABANDONED (8) deadlines."""
        drafter = self._drafter
        if drafter is None or self._num_abandoned >= MOST_ABANDONED:
            return
        try:
            self._run(drafter, lambda _: drafter.release(state))
        except Exception as error:
            reason = (
                str(error) if isinstance(error, _OutOfTimeError) else f"failed with {type(error).__name__}: {error}"
            )
            warnings.warn(
                f"request {state.request_id}: drafter {drafter.name} {reason:.200}, in release",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Ends the drafter's thread at the end of a run."""
        if self._thread is not None:
            self._thread.jobs.put(None)
            self._thread = None

    def _run(self, drafter: Drafter, job: "Callable[[Any], Any]", context: DraftContext | None = None) -> Any:
        """Returns job(context); runs it in a second thread if the drafter is the user's and has a deadline. Raises:
        _OutOfTimeError after the deadline."""
        seconds = deadline_seconds(drafter)
        if seconds is None or is_own(drafter):
            return job(context)
        if self._num_abandoned >= MOST_ABANDONED:
            raise _OutOfTimeError(
                f"did not return from {MOST_ABANDONED} calls within {seconds:g} s each, and is not called again"
            )
        if self._thread is None:
            self._thread = _Thread()
        try:
            return self._thread.run(job, context, seconds)
        except (_OutOfTimeError, KeyboardInterrupt) as error:
            self._thread.abandon()
            self._thread = None
            self._num_abandoned += isinstance(error, _OutOfTimeError)
            raise


def is_own(drafter: object) -> bool:
    """Returns True if a drafter is one of cacheprobe's and runs no function or lens of the user."""
    parts = [drafter, *([lens] if (lens := getattr(drafter, "lens", None)) is not None else [])]
    return not isinstance(drafter, Scripted) and all(type(p).__module__.split(".")[0] == "cacheprobe" for p in parts)


def _checked(
    result: Any, states: Sequence[SequenceState], max_tokens: int, step: int, name: str
) -> list[tuple[int, ...]]:
    """Returns a drafter's result as a list with one tuple of up to `max_tokens` token ids for each request. Raises:
    EngineError if the result is not one list of whole numbers for each request."""
    numbers = ", ".join(str(state.request_id) for state in states)
    wanted = f"must return {len(states)} lists of token ids, one for each request"
    if not _is_list(result):
        raise EngineError(f"requests {numbers} step {step}: drafter {name} {wanted}, got {result!r:.60}")
    proposals = list(islice(result, len(states) + 1))
    if len(proposals) != len(states):
        count = len(result) if hasattr(result, "__len__") else f"{len(proposals)} or more"
        raise EngineError(f"requests {numbers} step {step}: drafter {name} {wanted}, got {count} lists")
    kept = []
    for state, token_ids in zip(states, proposals, strict=True):
        where = f"request {state.request_id} step {step}: drafter {name}"
        if not _is_list(token_ids):
            raise EngineError(f"{where} must propose a list of token ids, got {token_ids!r:.60}")
        try:
            kept.append(tuple(whole_number("a proposed token", token_id) for token_id in islice(token_ids, max_tokens)))
        except ValueError as error:
            raise EngineError(f"{where}: {error}; propose token ids") from error
    return kept


def _is_list(value: object) -> bool:
    """Returns True for an iterable that is neither text nor bytes nor a mapping."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping)


class _OutOfTimeError(Exception):
    """Raised if a drafter's call missed its deadline, or if too many calls before did."""


class _AbandonedError(BaseException):
    """Raised inside a drafter whose call was abandoned. `except Exception` does not catch it."""


class _Thread:
    """Runs the drafter's jobs in a second thread. The jobs' calls of the engine run in the thread that calls `run`."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        """To the thread: (function from `_copy_settings`, job without arguments); None ends the thread."""
        self._messages: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        """From the thread: ("call", (method, arguments)), ("returned", value) or ("raised", error)."""
        self._results: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        """To the thread: (result, error) of a call of the engine."""
        self._is_abandoned = threading.Event()
        # no reference to `self`, so that a run to which no reference is left ends at once
        self._thread = threading.Thread(
            target=_work, args=(self.jobs, self._messages, self._is_abandoned), name="drafter", daemon=True
        )
        self._thread.start()

    def run(self, job: "Callable[[Any], Any]", context: DraftContext | None, seconds: float) -> Any:
        """Runs a job in the thread, with a DraftContext for that thread, and returns the job's result. Raises:
        _OutOfTimeError after the deadline."""
        usable = None
        if context is not None:
            usable = _ThreadContext(context.model, self._messages, self._results, self._is_abandoned)
        with model_lock.lent_to(self._thread.ident):  # it may run a model by itself
            self.jobs.put((_copy_settings(), lambda: job(usable)))
            return self._wait(context, seconds)

    def _wait(self, context: DraftContext | None, seconds: float) -> Any:
        """Returns the result of the thread's job; meanwhile runs the engine's functions that the job calls. Raises:
        _OutOfTimeError after the deadline."""
        began = time.monotonic()
        until, last = began + seconds, began + _MAX_DEADLINES * seconds
        while True:
            try:
                kind, value = self._messages.get(timeout=max(min(until, last) - time.monotonic(), 0))
            except Empty:
                raise _OutOfTimeError(
                    f"did not return within {seconds:g} s; a slower one sets its attribute deadline_seconds"
                ) from None
            if kind == "returned":
                return value
            if kind == "raised":
                raise value
            call_began = time.monotonic()
            self._results.put(_call_engine(context, value))
            until += time.monotonic() - call_began

    def abandon(self) -> None:
        """Abandons the thread: it can no longer call the engine, and an exception ends a Python loop in it. A thread
        blocked outside the engine gets no exception, since Python 3.11 could then hang."""
        self._is_abandoned.set()
        self._results.put((None, _AbandonedError()))
        ident = self._thread.ident
        if ident is not None and _is_computing(ident):  # alive, because the None below has not ended it
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_AbandonedError))
        self.jobs.put(None)


def _is_computing(ident: int) -> bool:
    """Returns True if the living thread `ident` uses the processor in the next 0.1 s, or if the system cannot tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return True
    clock = time.pthread_getcpuclockid(ident)
    began = time.clock_gettime(clock)
    for _ in range(10):
        time.sleep(0.01)
        if time.clock_gettime(clock) - began > _LITTLE_SECONDS:
            return True
    return False


class _ThreadContext:
    """Sends the calls of a DraftContext from the drafter's thread to the run's thread, and waits for each result."""

    def __init__(self, model: Any, messages: SimpleQueue, results: SimpleQueue, is_abandoned: threading.Event) -> None:
        self.model = model
        self._messages, self._results, self._is_abandoned = messages, results, is_abandoned

    def feed_newest(self, states: Sequence[SequenceState], num_layers: int | None = None) -> Tensor:
        """Calls DraftContext.feed_newest in the run's thread. Returns logits [b, v], or with `num_layers` the
        residual stream [b, m]."""
        return self._call("feed_newest", states, num_layers)

    def choose(self, state: SequenceState, logits: Tensor, drafted: Sequence[int] = ()) -> int:
        """Calls DraftContext.choose in the run's thread. Returns the token id."""
        return self._call("choose", state, logits, drafted)

    def _call(self, name: str, *args: Any) -> Any:
        """Sends a call to the run's thread, waits, and returns its result or raises its error."""
        if self._is_abandoned.is_set():
            raise _AbandonedError
        self._messages.put(("call", (name, args)))
        value, error = self._results.get()
        if error is not None:
            raise error
        return value


def _call_engine(context: DraftContext | None, call: tuple[str, tuple[Any, ...]]) -> tuple[Any, BaseException | None]:
    """Calls a method of the context, given as (name, arguments). Returns (result, None), or (None, error)."""
    name, args = call
    try:
        return getattr(context, name)(*args), None
    except Exception as error:  # raised again in the drafter, as if it had made the call itself
        return None, error


def _work(jobs: SimpleQueue, messages: SimpleQueue, is_abandoned: threading.Event) -> None:
    """Runs jobs from a queue and puts their results into `messages`, until a job is None or the call is abandoned."""
    try:
        while (job := jobs.get()) is not None and not is_abandoned.is_set():
            messages.put(_result(*job))
            del job  # it refers to the run, which ends when no reference is left
    except _AbandonedError:  # it came just after the job had returned
        pass


def _result(enter_settings: "Callable[[ExitStack], contextvars.Context]", job: Callable[[], Any]) -> tuple[str, Any]:
    """Runs a job under settings from `_copy_settings`. Returns ("returned", result) or ("raised", error) of the job."""
    try:
        with ExitStack() as stack:
            return "returned", enter_settings(stack).run(job)
    except BaseException as error:  # KeyboardInterrupt and SystemExit are raised again in the caller, too
        return "raised", error


def _copy_settings() -> "Callable[[ExitStack], contextvars.Context]":
    """Returns a function (ExitStack) -> contextvars.Context for another thread. It sets this thread's torch settings
    until the stack closes, and returns this thread's context variables."""
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    variables = contextvars.copy_context()

    def enter(stack: ExitStack) -> contextvars.Context:
        """Sets the torch settings until the stack closes, and returns the copied context variables."""
        stack.enter_context(torch.inference_mode(is_inference))
        stack.enter_context(torch.set_grad_enabled(has_grad))
        for kind, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype))
        return variables

    return enter
