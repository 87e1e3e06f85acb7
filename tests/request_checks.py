"""Checks the requests of every run in the tests: after each step and each round, that their fields fit their status."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from cacheprobe.engine.committer import Committer
from cacheprobe.engine.scheduler import Scheduler
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import ENDED, STATUS_OF_REASON, Status, StatusError

IS_ON = True
"""False in a test that counts the work of a run."""
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


def check(state: SequenceState) -> None:
    """Checks that the fields fit the status (table FIELDS), and that the number of used cache slots fits the
    committed and drafted tokens.

    A running request has at least every committed token but the newest in the cache, at most also the newest and
    the whole draft.
    Raises: StatusError that names the request and the fault.
    """
    status, last = state.status, state.last_committed_position
    is_set_by_name = {
        "cache_row": state.cache_row >= 0,
        "cache": state.cache is not None,
        "prompt_logits": state.prompt_logits is not None,
        "num_prefilled": state.num_prefilled > 0,
        "draft": bool(state.draft),
        "draft_probs": bool(state.draft_probs),
        "num_generated": state.num_generated > 0,
        "finish": state.finish is not None,
        "error": state.error is not None,
        "kept_rows": state.kept_rows is not None,
    }
    for name, is_set in is_set_by_name.items():
        must, may = FIELDS[name]
        if (status in must and not is_set) or (is_set and status not in may):
            value = "not set" if not is_set else f"{getattr(state, name)!r:.40}"
            raise StatusError(f"request {state.request_id} is {status.value}, but its {name} is {value}")
    if state.finish is not None and STATUS_OF_REASON.get(state.finish, Status.FINISHED) is not status:
        raise StatusError(f"request {state.request_id} is {status.value}, but its finish is {state.finish!r}")
    if status is Status.RUNNING and state.num_prefilled != state.request.num_prompt_tokens:
        raise StatusError(f"request {state.request_id} is running, but its prompt is read to {state.num_prefilled}")
    num_cached = 0 if state.cache is None else int(state.cache.lengths[state.cache_row])
    if not (last if status is Status.RUNNING else 0) <= num_cached <= len(state.token_ids) + len(state.draft):
        raise StatusError(
            f"request {state.request_id} is {status.value} and has {num_cached} tokens in the cache, "
            f"{len(state.token_ids)} committed and {len(state.draft)} drafted"
        )


@contextmanager
def checked_states() -> Iterator[None]:
    """Makes every run inside the `with` call `check` on the requests of each step after the step, and on all that wait
    or run after the round. Raises: StatusError in a run whose request breaks it."""
    report, retire = Committer.report, Scheduler.retire

    def checked_report(self: Committer, phase: str, states: Any, **outcome: Any) -> None:
        report(self, phase, states, **outcome)
        for state in states if IS_ON else ():
            check(state)

    def checked_retire(self: Scheduler) -> list[SequenceState]:
        ended = retire(self)
        if IS_ON and self.cache.keys:  # the requests of an estimate have no keys
            for state in (*ended, *self.running, *self.waiting):
                check(state)
        return ended

    with patch.object(Committer, "report", checked_report), patch.object(Scheduler, "retire", checked_retire):
        yield
