"""Defines the status of a request in a run, and which status may follow which. Rows of a trace have other statuses
(`core.records.STATUSES`)."""

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


class StatusError(RuntimeError):
    """Raised if a status would change in a way that is not allowed."""
