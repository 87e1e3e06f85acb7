"""Who runs when: arrivals, limits, preemption and cancellation, and that nobody is lost on the way."""

import pytest

import cacheprobe as cp
from cacheprobe.core.records import Request
from tests.invariants.machines import Meddler, tiny
from tests.invariants.runs import NEW, PROMPTS, RUN, Watched, babbler

pytestmark = pytest.mark.determinism


def test_all_who_have_arrived_start_together() -> None:
    """Arrival step 0 is the first round's: a round begins at the step that comes next, and not at the last one. (The
    first request alone was read, and decoded once, before the others were let in.)"""
    trace = cp.run(tiny(), PROMPTS, **RUN)
    first = trace.events().query("step == 0")
    assert set(first.phase) == {"prefill"} and first.request_id.tolist() == [0, 1, 2, 3, 4]


def test_a_request_joins_the_first_round_at_or_after_its_step() -> None:
    requests = [Request(p, arrival_step=step) for p, step in zip(PROMPTS, [0, 1, 4, 7, 500], strict=True)]
    run = Watched(tiny(), requests)
    ends = list(run)
    begins = [0] + [end + 1 for end in ends[:-1]]
    joined = run.trace.events().query("phase == 'prefill'").groupby("request_id").step.min()
    for i, arrival in enumerate([0, 1, 4, 7]):
        assert joined[i] == min(begin for begin in begins if begin >= arrival)
    assert joined[4] < 500, "nothing else ran, so there was nothing to wait for"
    assert len(run.trace.committed(4)) == NEW


@pytest.mark.parametrize("max_batch", [1, 2, 3])
def test_at_most_max_batch_hold_a_row(max_batch: int) -> None:
    run = Watched(tiny(), PROMPTS, max_batch=max_batch, deterministic=[1, 3])
    most = max(len(run.running) for _ in run)
    assert most <= max_batch
    passes = run.trace.events().query("phase == 'decode'").groupby("step").size()
    assert passes.max() == max_batch
    assert [len(run.trace.committed(i)) for i in range(5)] == [NEW] * 5


def test_the_newest_gives_way_and_the_oldest_never() -> None:
    run = Watched(tiny(), PROMPTS, deterministic=True, max_kv_tokens=40).finished()
    preempted = {request_id for request_id, _ in run.trace.meta["preemptions"]}
    assert preempted and 0 not in preempted
    assert run.log.preemptions == run.trace.meta["preemptions"]


@pytest.mark.parametrize("drafter", [None, babbler(1)], ids=["fast path", "babbler"])
def test_kv_rows_is_never_exceeded(drafter) -> None:
    held: list[int] = []
    spy = Meddler(tiny(), lambda call: held.append(int(call.cache.lengths.sum())))
    run = Watched(spy, PROMPTS, deterministic=[0, 2, 4], max_kv_tokens=36, drafter=drafter).finished()
    assert 20 < max(held) <= 36 and run.trace.meta["preemptions"]


def test_cancelling_one_that_waits_preempts_nobody() -> None:
    def preempted(is_cancelled: bool) -> list:
        run = Watched(tiny(), PROMPTS[:2] + [[1, 5]], deterministic=True, max_batch=2, max_kv_tokens=40)
        run.states[2].is_cancel_requested = is_cancelled
        run.finished()
        assert run.trace.meta["finish"]["2"] == ("cancelled" if is_cancelled else "length")
        return run.trace.meta["preemptions"]

    assert preempted(False) == preempted(True) == []


def test_every_moment_is_right_for_cancelling() -> None:
    """A request cancelled after any round, whatever state it is in, leaves the others as they were."""
    want = cp.reference(tiny(), PROMPTS[:3], **RUN)
    moments = 0
    for round_number in range(14):
        run = Watched(tiny(), PROMPTS[:3], deterministic=True, max_kv_tokens=30)
        for number, _ in enumerate(run):
            if number == round_number and not run.states[1].finish:
                run.states[1].is_cancel_requested = True
                moments += 1
        for i in (0, 2):
            assert run.trace.committed(i) == want.committed(i)
        said = run.trace.committed(1)
        assert said == want.committed(1)[: len(said)]
        assert run.cache.num_free_rows == run.cache.rows
    assert moments >= 8
