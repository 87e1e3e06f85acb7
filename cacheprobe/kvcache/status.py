"""Defines the status of a request in a run, and which status may follow which. Rows of a trace have other statuses
(`core.records.STATUSES`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum


class Status(Enum):
    """Names what a request does now. A request has exactly one status at any time."""

    WAITING = "waiting"
    """The request is not admitted yet: it has no cache row."""
    PREFILLING = "prefilling"
    """The request is admitted: a pass reads its prompt, or after a preemption computes its keys and values again."""
    RUNNING = "running"
    """The prompt is cached and a first token is committed."""
    PREEMPTED = "preempted"
    """The request lost its cache row, and waits to be admitted again."""
    FINISHED = "finished"
    """The request has ended by a stop token, a stop text or its length."""
    FAILED = "failed"
    """The request has ended because its passes fail."""
    CANCELLED = "cancelled"
    """The request has ended because its caller cancelled it."""

    __hash__ = object.__hash__  # an Enum's own hash is Python code, which the loop would run for every request


ENDED = frozenset({Status.FINISHED, Status.FAILED, Status.CANCELLED})

ALLOWED: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.PREFILLING, Status.CANCELLED}),
    Status.PREFILLING: frozenset({Status.RUNNING, Status.FAILED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, *ENDED}),
    Status.PREEMPTED: frozenset({Status.PREFILLING, Status.CANCELLED}),
    **dict.fromkeys(ENDED, frozenset()),
}
"""The statuses that may follow each status. A prefill ends with a commit, so a request runs before it finishes."""

STATUS_OF_REASON = {"error": Status.FAILED, "cancelled": Status.CANCELLED}
"""Status of an ended request, by its finish reason; FINISHED for every reason that is not in the table."""


_ADMITTED = frozenset({Status.PREFILLING, Status.RUNNING})
_NONE: frozenset[Status] = frozenset()

FIELDS: dict[str, tuple[frozenset[Status], frozenset[Status]]] = {
    "cache_row": (_ADMITTED, _ADMITTED | ENDED),
    "cache": (_ADMITTED, _ADMITTED | ENDED),
    "prompt_logits": (_NONE, _ADMITTED | ENDED),
    "num_prefilled": (frozenset({Status.RUNNING}), _ADMITTED | ENDED),
    "draft": (_NONE, frozenset({Status.RUNNING})),
    "draft_probs": (_NONE, frozenset({Status.RUNNING})),
    "num_generated": (
        frozenset({Status.RUNNING, Status.PREEMPTED, Status.FINISHED}),
        frozenset(Status) - {Status.WAITING},
    ),
    "finish": (ENDED, ENDED),
    "error": (frozenset({Status.FAILED}), frozenset({Status.FAILED})),
    "kept_rows": (_NONE, frozenset({Status.FINISHED, Status.CANCELLED})),
}
"""For fields of a SequenceState: (statuses in which the field must be set, statuses in which it may be set).

An ended request keeps its cache row until the scheduler retires it at the end of the round.
"""


class StatusError(RuntimeError):
    """Raised if a status would change in a way that is not allowed, or if a request's fields contradict its status."""


_is_checking: ContextVar[bool] = ContextVar("is_checking", default=False)


def is_checking() -> bool:
    """Returns True inside `with checked_states()`, in which runs call `SequenceState.check` after each step."""
    return _is_checking.get()


@contextmanager
def checked_states() -> Iterator[None]:
    """Makes every run inside the `with` call `SequenceState.check` on the requests of each step after the step, as in
    the tests.

    Raises: StatusError in a run whose request breaks `SequenceState.check`.
    """
    token = _is_checking.set(True)
    try:
        yield
    finally:
        _is_checking.reset(token)
