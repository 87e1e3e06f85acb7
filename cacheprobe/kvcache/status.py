"""The status of a request in a run, and the transitions between statuses that are allowed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum


class Status(Enum):
    """What a request does now. It has exactly one status at any time."""

    WAITING = "waiting"
    """Not admitted yet: it has no place in the cache."""
    PREFILLING = "prefilling"
    """Admitted: its prompt is read, or after a preemption its cache contents are computed again."""
    RUNNING = "running"
    """Its prompt is cached and a first token is committed."""
    PREEMPTED = "preempted"
    """It gave up its place in the cache, and waits to be admitted again."""
    FINISHED = "finished"
    """It has ended by a stop token, a stop text or its length."""
    FAILED = "failed"
    """It has ended because its passes fail."""
    CANCELLED = "cancelled"
    """It has ended because its caller asked for that."""

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

OF_FINISH = {"error": Status.FAILED, "cancelled": Status.CANCELLED}
"""The status for each reason of an end; FINISHED for the others."""


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
"""For fields of a SequenceState: the statuses in which the field must be set, and those in which it may be set.

An ended request keeps its row until the scheduler retires it at the end of the round."""


class StatusError(RuntimeError):
    """Says that a request's status changed in a way that is not allowed, or that its fields contradict its status."""


_is_checking: ContextVar[bool] = ContextVar("is_checking", default=False)


def is_checking() -> bool:
    """Returns whether runs check the state of their requests after every step."""
    return _is_checking.get()


@contextmanager
def checked_states() -> Iterator[None]:
    """Inside the `with`, runs check the state of their requests after every step; the tests and the stress command do.

    Raises: StatusError in a run whose request breaks `SequenceState.check`.
    """
    token = _is_checking.set(True)
    try:
        yield
    finally:
        _is_checking.reset(token)
