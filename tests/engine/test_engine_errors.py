"""Where a pass fails: the request that failed ends, and nobody else can tell, not even from a bit of a state."""

from functools import cache
from itertools import count

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.engine import choosing, committer
from cacheprobe.engine.model_runner import EngineError
from cacheprobe.models.fast.lm import FastLM
from cacheprobe.models.paths import choose_path
from cacheprobe.trace.head_blocks import HeadBlocks
from cacheprobe.trace.recording.recorder import Recorder
from cacheprobe.trace.self_checks import CaptureError
from cacheprobe.trace.state_store import Blocks
from tests.invariants.machines import Call, Faulty, tiny, wide_bfloat16
from tests.invariants.runs import CHUNK, NEW, PROMPTS, RUN, G, Outcome, W, Watched, future, outcome
from tests.tiny import hf_model

pytestmark = pytest.mark.determinism

BAD = 96
"""A token that the model below cannot digest."""


def indigestible() -> FastLM:
    """A tiny model whose embedding of token BAD is NaN: its keys and values are NaN too, wherever it is fed."""
    model = cp.load_model(hf_model())
    fast = choose_path(model, "fast")[0]
    assert isinstance(fast, FastLM)
    with torch.no_grad():
        model.bridge.original_model.get_input_embeddings().weight[BAD] = torch.nan
    return fast


def shapes_of(phase: str) -> set[tuple[int, int]]:
    return {"prefill": {(1, CHUNK)}, "verify": {(G, W), (G, 2)}}[phase]


@cache
def undisturbed() -> list[Outcome]:
    return [outcome(cp.run(tiny(), PROMPTS[:4], **RUN, deterministic=True), i) for i in range(4)]


@pytest.mark.parametrize(
    ("phase", "fault", "number"),
    [("prefill", "nan", 0), ("prefill", "out of memory", 0), ("decode", "raise", 0), ("decode", "nan", 2)]
    + [("verify", "nan", 0), ("verify", "nan", 1), ("verify", "out of memory", 1), ("verify", "raise", 2)],
)
def test_one_fails_and_the_others_never_know(phase: str, fault: str, number: int) -> None:
    """A group whose pass failed is run again, one by one. What the failed pass had shown the recorder was kept beside
    what the second try showed: the others had two canonical rows for a position, and other digests. On passes where
    the capture checks itself, NaN in one request's logits even ended the run."""
    want = undisturbed()
    victim = 0 if phase == "prefill" else 1
    count = 0

    def plan(call: Call):
        nonlocal count
        row = run.states[victim].cache_row
        if row not in call.rows or (call.shape[1] != 1 if phase == "decode" else call.shape not in shapes_of(phase)):
            return None
        count += 1
        if count <= number:
            return None
        errors = {"nan": [row], "raise": ValueError("no"), "out of memory": torch.OutOfMemoryError("no")}
        return errors[fault]

    run = Watched(Faulty(tiny(), plan), PROMPTS[:4], deterministic=True, capture="STCZ")
    run.finished()
    assert run.spy.num_faults
    for i in range(4):
        if i == victim:
            assert (
                run.trace.meta["finish"][str(i)] == "error"
                and f"request{'s' * (fault != 'nan')} {i}" in (run.trace.meta["errors"][str(i)])
            )
            assert run.trace.committed(i) == want[i].tokens[: len(run.trace.committed(i))]
            rows = run.trace.rows(i, "committed")
            assert rows.position.is_unique and len(rows) <= len(PROMPTS[i]) + len(run.trace.committed(i)) - 1 + W
        else:
            assert outcome(run.trace, i) == want[i]
    assert run.cache.num_free_rows == run.cache.rows


@pytest.mark.parametrize("fault", ["nan", "raise"])
def test_a_failure_that_passes_costs_a_pass_and_nothing_else(fault: str) -> None:
    want = undisturbed()
    for number in (0, 6, 7, 12):

        def plan(call: Call, number: int = number):
            return None if call.number != number else call.rows[:1] if fault == "nan" else MemoryError("for once")

        run = Watched(Faulty(tiny(), plan), PROMPTS[:4], deterministic=True, capture="STCZ")
        run.finished()
        assert run.spy.num_faults == 1
        assert not run.trace.meta["errors"]
        assert [outcome(run.trace, i) for i in range(4)] == want


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


def test_logits_of_a_prefill_group_do_not_depend_on_where_the_others_end() -> None:
    """Prompts that end at one slot were read out in one row each, and at several slots in all of their rows: in
    bfloat16 another product, other bits, and another log-probability for a deterministic request's first token."""
    model = wide_bfloat16()
    prompts = [[*range(3, 3 + length)] for length in (5, 6, 7, 8, 3, 5)]
    settings = dict(window=W, group=G, capacity=64, prefill_chunk=8, prefill_group=3, max_new_tokens=2, progress=False)
    trace = cp.run(model, prompts, **settings, deterministic=True)
    for i, prompt in enumerate(prompts):
        assert outcome(trace, i) == outcome(cp.reference(model, [prompt], **settings))


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


def test_a_failing_drafter_names_itself_and_ends_its_requests() -> None:
    def script(state):
        if state.request_id == 1 and state.num_generated > 3:
            raise KeyError("lost")
        return [1, 2]

    want = cp.reference(tiny(), PROMPTS[:3], **RUN)
    with pytest.warns(RuntimeWarning, match="drafter scripted failed with KeyError"):
        trace = cp.run(tiny(), PROMPTS[:3], **RUN, drafter=cp.drafters.Scripted(script), deterministic=True)
    assert trace.meta["finish"] == {"0": "length", "1": "error", "2": "length"}
    assert outcome(trace, 0) == outcome(want, 0) and outcome(trace, 2) == outcome(want, 2)
    assert 3 < len(trace.committed(1)) < NEW and trace.committed(1) == want.committed(1)[: len(trace.committed(1))]


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
    [(Blocks, "open", NO_MEMORY[2]), (HeadBlocks, "open", NO_MEMORY[1]), (Recorder, "_queue", NO_MEMORY[0])],
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
    runs_out_of_memory(monkeypatch, Blocks, "open", NO_MEMORY[0], lambda number: number > 20)
    with pytest.raises(EngineError, match=r"the (decode|verify) pass of requests 0, .*OutOfMemoryError") as e:
        cp.run(tiny(), PROMPTS[:4], **RUN, drafter=cp.drafters.EarlyExit(layer=1), deterministic=True)
    assert "drafter" not in str(e.value)


def test_a_fault_of_the_recorder_ends_the_run(monkeypatch) -> None:
    """Only a lack of memory is a matter of the pass: states that contradict the model are one of the run."""
    runs_out_of_memory(monkeypatch, Recorder, "_queue", CaptureError("no"), lambda number: number == 9)
    with pytest.raises(CaptureError):
        cp.run(tiny(), PROMPTS[:4], **RUN, deterministic=True)


@pytest.mark.parametrize("error", NO_MEMORY, ids=["GPU", "Python", "CPU"])
@pytest.mark.parametrize("drafter", [None, cp.drafters.EarlyExit(layer=1)], ids=["decode", "draft and verify"])
def test_memory_that_runs_out_in_a_choice_ends_that_request(monkeypatch, drafter, error: Exception) -> None:
    """The others go on with the same tokens. An error in the choice of a decode had ended the run."""
    settings = dict(**RUN, drafter=drafter, deterministic=[0])
    want, right = cp.run(tiny(), PROMPTS[:3], **settings), choosing.choose_next

    def choose_next(state, *given):
        if state.request_id == 1 and state.num_generated >= 2:
            raise error
        return right(state, *given)

    for module in (choosing, committer):
        monkeypatch.setattr(module, "choose_next", choose_next)
    trace = cp.run(tiny(), PROMPTS[:3], **settings)
    assert trace.meta["finish"] == {"0": "length", "1": "error", "2": "length"}
    assert "request 1 step" in trace.meta["errors"]["1"] and "choosing a token failed" in trace.meta["errors"]["1"]
    assert outcome(trace, 0) == outcome(want, 0) and trace.committed(2) == want.committed(2)


def test_memory_that_runs_out_while_a_choice_is_recorded_ends_that_request(monkeypatch) -> None:
    runs_out_of_memory(monkeypatch, Recorder, "on_choice", NO_MEMORY[1], lambda number: number == 9)
    trace = cp.run(tiny(), PROMPTS[:3], **RUN, deterministic=True)
    assert sorted(trace.meta["finish"].values()) in (["length"] * 3, ["error", "length", "length"])
