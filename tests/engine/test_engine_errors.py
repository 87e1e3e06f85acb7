"""Where a pass fails: the request that failed ends, and nobody else can tell, not even from a bit of a state."""

from itertools import count

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.engine import committer
from cacheprobe.engine.passes import EngineError
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from cacheprobe.trace.recording.kept_states import KeptStates, PassStates
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.self_checks import CaptureError
from tests.invariants.machines import Call, Faulty, tiny
from tests.invariants.runs import CHUNK, PROMPTS, RUN, Watched, future, outcome
from tests.tiny import hf_model

pytestmark = pytest.mark.determinism

BAD = 96
"""A token that the model below cannot digest."""


def indigestible() -> PlainLM:
    """A tiny model whose embedding of token BAD is NaN: its keys and values are NaN too, wherever it is fed."""
    model = cp.load_model(hf_model())
    fast = choose_path(model, "plain")[0]
    assert isinstance(fast, PlainLM)
    with torch.no_grad():
        model.bridge.original_model.get_input_embeddings().weight[BAD] = torch.nan
    return fast


def test_nan_does_not_stay_in_the_cache() -> None:
    """A masked slot counts with weight 0, and 0 x NaN is NaN: a row that a failed request leaves behind must be clean.
    (The next request in that row failed too, and the run ended with a CacheIntegrityError.)"""
    model = indigestible()
    for deterministic in (False, True):
        want = [cp.run(model, [p], **RUN, deterministic=deterministic) for p in PROMPTS[:2]]
        prompts = [PROMPTS[0], [4] * 9 + [BAD] * 9, PROMPTS[1]]
        for max_batch in (1, 3):
            with pytest.warns(RuntimeWarning, match="request 1 ended with an error.*hold NaN"):
                trace = cp.run(model, prompts, **RUN, deterministic=deterministic, max_batch=max_batch)
            assert trace.meta["finish"] == {"0": "length", "1": "error", "2": "length"}
            for number, i in enumerate((0, 2)):
                assert trace.committed(i) == want[number].committed(0)
                assert not deterministic or trace.digest(i) == want[number].digest(0)


def test_nan_while_rows_are_rebuilt_is_noticed() -> None:
    """The prompt of a preempted request is read again without a choice: its NaN was in the cache before any pass that
    looked at logits met it, and stayed there when the request had ended."""
    in_rebuild = 0

    def plan(call: Call):
        nonlocal in_rebuild
        state = run.states[1]
        is_rebuild = state.cache_row in call.rows and state.num_generated > 0 and call.shape == (1, CHUNK)
        in_rebuild += is_rebuild
        return [state.cache_row] if is_rebuild else None

    run = Watched(Faulty(tiny(), plan), [PROMPTS[0], PROMPTS[3], PROMPTS[1]], deterministic=True, max_kv_tokens=34)
    for _ in run:
        run.cache.check_integrity()
    assert in_rebuild == 1 and "hold NaN" in run.trace.meta["errors"]["1"]
    want = cp.reference(tiny(), [PROMPTS[0], PROMPTS[1]], **RUN)
    assert [run.trace.committed(i) for i in (0, 2)] == [want.committed(i) for i in range(2)]


def test_a_candidate_that_cannot_be_digested_costs_a_pass() -> None:
    """Drafts are hints. One whose states are NaN ended its request, which would never have said that token."""
    model = indigestible()
    want = cp.reference(model, PROMPTS, **RUN)
    assert all(BAD not in want.committed(i) for i in range(5))
    for script in (lambda state: [*future(want, state)[:1], BAD, 5],):
        run = Watched(model, PROMPTS, drafter=cp.drafters.Scripted(script), deterministic=True, capture="STCZ")
        run.finished()
        assert not run.trace.meta["errors"]
        assert [outcome(run.trace, i) for i in range(5)] == [outcome(want, i) for i in range(5)]
        run.cache.check_integrity()


def test_a_failed_prefill_is_no_source_for_others() -> None:
    """The first of three identical prompts fails once; the second reads for itself, the third shares with it."""
    prompts = [PROMPTS[0]] * 3
    want = cp.reference(tiny(), prompts[:1], **RUN)
    plans = {"nan": lambda call: [0] if call.number == 0 else None, "raise": lambda call: error(call)}

    def error(call: Call):
        return RuntimeError("once") if call.number == 0 else None

    for plan in plans.values():
        run = Watched(Faulty(tiny(), plan), prompts, deterministic=True, capture="STCZ").finished()
        assert run.trace.meta["finish"] == {"0": "error", "1": "length", "2": "length"}
        assert outcome(run.trace, 1) == outcome(run.trace, 2) == outcome(want, 0)
        assert [call.shape for call in run.spy.calls].count((1, CHUNK)) == 2


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_request_whose_settings_fail_leaves_its_group_alone() -> None:
    """The pass went well and one of its choices did not: the capture had already seen everyone's rows."""
    hot = SamplingParams(temperature=1e-309, top_k=5)  # logits divided by it overflow
    for settings in (dict(deterministic=False), dict(deterministic=True, prefill_group=3)):
        want = cp.run(tiny(), PROMPTS[:2], **RUN, **settings, capture="STCZ")
        requests = [*PROMPTS[:2], Request(PROMPTS[2], hot)]
        run = Watched(tiny(), requests, **settings, capture="STCZ").finished()
        assert run.trace.meta["finish"]["2"] == "error"
        for i in (0, 1):
            assert run.trace.rows(i, "committed").position.is_unique
            if settings["deterministic"]:
                assert outcome(run.trace, i) == outcome(want, i)


def test_all_failed_is_an_error() -> None:
    def plan(call: Call):
        return RuntimeError("never works")

    for deterministic in (False, True):
        run = Watched(Faulty(tiny(), plan), PROMPTS, deterministic=deterministic)
        with pytest.raises(EngineError, match="never works"):
            run.finished()
        assert run.cache.num_free_rows == run.cache.rows
        with pytest.raises(EngineError, match="never works"):
            cp.reference(run.spy, PROMPTS, **RUN)


NO_MEMORY = (
    torch.OutOfMemoryError("no"),
    MemoryError("no"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: no"),
)
HEADS = cp.CaptureConfig(sites="STCZ", heads=("z",))


def runs_out_of_memory(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: Exception, which) -> list[int]:
    """Lets a method of the recorder's side raise in the calls that `which(number)` names; returns the failed calls."""
    right, numbers, failed = getattr(owner, method), count(), []

    def short(self, *args):
        if which(number := next(numbers)):
            failed.append(number)
            raise error
        return right(self, *args)

    monkeypatch.setattr(owner, method, short)
    return failed


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [(KeptStates, "open", NO_MEMORY[2]), (PassStates, "finish", NO_MEMORY[1]), (Recorder, "_queued", NO_MEMORY[0])],
    ids=["S on the CPU", "z", "Z on a GPU"],
)
def test_records_that_do_not_fit_cost_a_pass(monkeypatch, owner: type, method: str, error: Exception) -> None:
    """The recorder allocated outside the pass's own try, so that its lack of memory ended the run and not the pass."""
    settings = dict(**RUN, deterministic=True, capture=HEADS)
    want = cp.run(tiny(), PROMPTS[:4], **settings)
    failed = runs_out_of_memory(monkeypatch, owner, method, error, lambda number: number in (0, 9, 15))
    trace = cp.run(tiny(), PROMPTS[:4], **settings)
    assert len(failed) == 3 and trace.meta["finish"] == dict.fromkeys("0123", "length")
    for i in range(4):
        assert outcome(trace, i) == outcome(want, i)
        assert all(torch.equal(trace.heads("z", layer, i), want.heads("z", layer, i)) for layer in range(2))


def test_records_that_never_fit_end_requests_and_blame_the_pass(monkeypatch) -> None:
    """In a decode the error came back through the drafter's call, and the message said that the drafter had failed."""
    runs_out_of_memory(monkeypatch, KeptStates, "open", NO_MEMORY[0], lambda number: number > 20)
    with pytest.raises(EngineError, match=r"the (decode|verify) pass of requests 0, .*OutOfMemoryError") as e:
        cp.run(tiny(), PROMPTS[:4], **RUN, drafter=cp.drafters.EarlyExit(layer=1), deterministic=True)
    assert "drafter" not in str(e.value)


def test_a_fault_of_the_recorder_ends_the_run(monkeypatch) -> None:
    """Only a lack of memory is a matter of the pass: states that contradict the model are one of the run."""
    runs_out_of_memory(monkeypatch, Recorder, "_queued", CaptureError("no"), lambda number: number == 9)
    with pytest.raises(CaptureError):
        cp.run(tiny(), PROMPTS[:4], **RUN, deterministic=True)


@pytest.mark.parametrize(
    ("drafter", "error"),
    [(None, NO_MEMORY[0]), (cp.drafters.EarlyExit(layer=1), NO_MEMORY[2])],
    ids=["decode", "draft and verify"],
)
def test_memory_that_runs_out_in_a_choice_ends_that_request(monkeypatch, drafter, error: Exception) -> None:
    """The others go on with the same tokens. An error in the choice of a decode had ended the run."""
    settings = dict(**RUN, drafter=drafter, deterministic=[0])
    want, right = cp.run(tiny(), PROMPTS[:3], **settings), committer.choose_next

    def choose_next(state, *given):
        if state.request_id == 1 and state.num_generated >= 2:
            raise error
        return right(state, *given)

    monkeypatch.setattr(committer, "choose_next", choose_next)
    trace = cp.run(tiny(), PROMPTS[:3], **settings)
    assert trace.meta["finish"] == {"0": "length", "1": "error", "2": "length"}
    assert "request 1 step" in trace.meta["errors"]["1"] and "choosing a token failed" in trace.meta["errors"]["1"]
    assert outcome(trace, 0) == outcome(want, 0) and trace.committed(2) == want.committed(2)


def test_memory_that_runs_out_while_a_choice_is_recorded_ends_that_request(monkeypatch) -> None:
    runs_out_of_memory(monkeypatch, Recorder, "on_choice", NO_MEMORY[1], lambda number: number == 9)
    trace = cp.run(tiny(), PROMPTS[:3], **RUN, deterministic=True)
    assert sorted(trace.meta["finish"].values()) in (["length"] * 3, ["error", "length", "length"])
