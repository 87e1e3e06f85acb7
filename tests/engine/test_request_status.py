"""A request's status: which transitions happen in real runs, which are refused, and which fields fit which status."""

from collections.abc import Iterator

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import (
    ALLOWED,
    STATUS_OF_REASON,
    Status,
    StatusError,
)
from tests.invariants.machines import Call, Faulty, tiny
from tests.invariants.runs import PROMPTS, Watched

Transition = tuple[Status, Status]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Transition]]:
    """Collects the transitions of all requests."""
    found, right = set(), SequenceState.become

    def become(state: SequenceState, status: Status) -> None:
        before = state.status
        right(state, status)
        found.add((before, status))

    monkeypatch.setattr(SequenceState, "become", become)
    yield found


def test_real_runs_go_through_every_allowed_transition(seen: set[Transition]) -> None:
    """With preemption, with cancellation in each status from which it is possible, and with passes that fail."""
    preempting = dict(deterministic=True, max_kv_tokens=24)
    assert Watched(tiny(), PROMPTS[:2], **preempting).finished().trace.meta["preemptions"]
    for status in (Status.WAITING, Status.RUNNING, Status.PREEMPTED):
        run = Watched(tiny(), PROMPTS[:2], **preempting, max_batch=2)
        last = run.states[1]
        last.is_cancel_requested = status is Status.WAITING
        for _ in run:
            last.is_cancel_requested |= last.status is status
        assert last.status is Status.CANCELLED and last.finish == "cancelled"
    for first_bad in (0, 8):  # in a prefill, and later

        def plan(call: Call, first_bad: int = first_bad):
            return RuntimeError("kernel") if call.number >= first_bad and call.rows[0] == 1 else None

        run = Watched(Faulty(tiny(), plan), PROMPTS[:2], deterministic=[0])
        run.finished()
        assert Status.FAILED in {state.status for state in run.states}
    allowed = {(before, after) for before, listed in ALLOWED.items() for after in listed}
    assert seen == allowed


@pytest.mark.parametrize("before", Status)
@pytest.mark.parametrize("after", Status)
def test_a_transition_that_is_not_allowed_names_request_from_and_to(before: Status, after: Status) -> None:
    state = made(before)
    if after in ALLOWED[before]:
        state.become(after)
        assert state.status is after
        return
    with pytest.raises(StatusError, match=f"request 7 cannot go from {before.value} to {after.value}; from"):
        state.become(after)
    assert state.status is before


# -- the invariant


def made(status: Status) -> SequenceState:
    """A request of that status, as a run leaves it between two rounds."""
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=(), stop=())
    state = SequenceState(Request([1, 2, 3], request_id=7, prompt_token_ids=(1, 2, 3)), True, sampling)
    if status is not Status.WAITING:
        state.admit(KVCache(1, 16, [(2, 4, 4)], torch.float32), 0)
    if status not in (Status.WAITING, Status.PREFILLING):
        state.cache.extend(state.cache_row, 0, 3, "prefill")
        state.num_prefilled = 3
        state.commit((9,))
    if status is Status.PREEMPTED:
        state.preempt()
    elif status in ALLOWED[Status.RUNNING]:
        reason = {status: reason for reason, status in STATUS_OF_REASON.items()}.get(status, "length")
        state.end(reason, "a kernel failed" if status is Status.FAILED else None)
    return state


def test_a_run_that_breaks_the_invariant_stops_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that leaves its draft, planted; in the tests every run is checked."""
    right = SequenceState.end

    def ends_with_a_draft(state: SequenceState, reason: str, error: str | None = None) -> None:
        right(state, reason, error)
        state.draft.append(3)

    monkeypatch.setattr(SequenceState, "end", ends_with_a_draft)
    with pytest.raises(StatusError, match=r"request 0 is finished, but its draft is \[3\]"):
        cp.run(tiny(), PROMPTS[:1], max_new_tokens=3, deterministic=True, progress=False)
