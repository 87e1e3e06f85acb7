"""Invariants 25 and 26: what fails leaves nothing behind, and no switch stays thrown."""

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from unittest.mock import patch

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Observer
from cacheprobe.engine import committer as books
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import EngineError
from cacheprobe.engine.prefill import prefills
from cacheprobe.engine.scheduler import Scheduler
from cacheprobe.engine.step import Engine
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.hf.shared import user_hooks
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from tests.invariants.machines import Call, Faulty, Meddler, Spy, tiny
from tests.invariants.runs import (
    CHUNK,
    HOT,
    PROMPTS,
    RUN,
    G,
    W,
    Watched,
    kv_snapshot,
    outcome,
    reference_rows,
    same_rows,
)
from tests.tiny import loaded

pytestmark = pytest.mark.determinism


def half_way(model: Spy) -> tuple[Engine, list[SequenceState]]:
    """Three requests with full drafts, about to be verified."""
    run = Watched(model, PROMPTS[:3], deterministic=True, sampling=HOT)
    cache = model.new_cache(len(run.states) + 1, run.config.capacity)
    engine = Engine(ModelRunner(model, cache, Observer(), RecomputeChecker(model)), run.config)
    scheduler = Scheduler(run.states, cache, run.config)
    for prefill, group in prefills(engine.prefill, scheduler.admit(0), scheduler.running):
        prefill(group)
    while drafting := scheduler.drafting():
        engine.decode(drafting)
    return engine, run.states


def held(engine: Engine, states: list[SequenceState]) -> list[tuple]:
    """Everything of a request that a failed pass might have changed, its committed cache rows included."""
    cache = engine.cache
    return [
        (
            list(s.token_ids),
            list(s.draft),
            s.finish,
            s.error,
            s.last_committed_position,
            int(cache.lengths[s.cache_row]),
        )
        + (cache.ledger.names(s.cache_row, cache.capacity), s.draft_is_closed, s.num_prefilled)
        for s in states
    ]


def test_invariant_25_exception_safety_of_a_verify_pass() -> None:
    """Whatever fails in a verify pass, in the model or in the sampler: requests and cache are as before it."""
    want, rows = reference_rows(tiny(), PROMPTS[:3], sampling=HOT)
    faults: list[Callable[[Call], object]] = [
        lambda call: RuntimeError("kernel"),
        lambda call: torch.OutOfMemoryError("memory"),
        lambda call: MemoryError("memory"),
        lambda call: [call.rows[1]],
    ]
    for fault in faults:
        model = Faulty(tiny(), lambda call, fault=fault: fault(call) if call.shape == (G, W) else None)
        engine, states = half_way(model)
        before = held(engine, states)
        committed = [kv_snapshot(engine.cache, s.cache_row, s.last_committed_position) for s in states]
        with pytest.raises(EngineError):
            engine.verify(states)
        assert held(engine, states) == before
        assert all(
            same_rows(kv_snapshot(engine.cache, s.cache_row, s.last_committed_position), rows_before)
            for s, rows_before in zip(states, committed, strict=True)
        )
        model.plan = lambda call: None
        engine.verify(states)
        for s in states:
            assert s.generated == want.committed(s.request_id)[: s.num_generated] and s.num_generated == 1 + W
            ours = kv_snapshot(engine.cache, s.cache_row, s.last_committed_position)
            assert same_rows(ours, [known[:, : s.last_committed_position] for known in rows[s.request_id]])


def test_invariant_25_exception_safety_of_the_sampler() -> None:
    """An error in the choice of the last row of the last request: none of the pass is committed."""
    engine, states = half_way(Spy(tiny()))
    before = held(engine, states)
    chosen = 0
    choose_next = books.choose_next

    def failing(*args: object) -> int:
        nonlocal chosen
        chosen += 1
        if chosen == 3 * W:
            raise ValueError("no token is left")
        return choose_next(*args)

    with patch.object(books, "choose_next", failing):
        with pytest.raises(EngineError, match="request 2 step .*no token is left"):
            engine.verify(states)
    assert chosen == 3 * W and held(engine, states) == before
    engine.verify(states)
    assert all(state.num_generated == 1 + W for state in states)


def test_invariant_25_exception_safety_in_a_run() -> None:
    """One request fails for good in some phase: the others have the digests of an undisturbed run."""
    want = [outcome(cp.run(tiny(), PROMPTS[:3], **RUN, sampling=HOT, deterministic=True), i) for i in range(3)]
    runs: list[Watched] = []
    for shape, kind in product(((1, CHUNK), (3, 1), (G, W)), ("nan", "error")):

        def plan(call: Call, shape: tuple[int, int] = shape, kind: str = kind):
            row = runs[-1].states[1].cache_row
            seen = (G, W) if call.shape == (G, 2) else call.shape  # a verify pass of short drafts
            if row not in call.rows or (seen != shape and (shape[1] != 1 or call.shape[1] != 1)):
                return None
            return [row] if kind == "nan" else torch.OutOfMemoryError("no")

        runs.append(Watched(Faulty(tiny(), plan), PROMPTS[:3], deterministic=True, sampling=HOT, capture="STCZ"))
        run = runs[-1].finished()
        assert run.trace.meta["finish"] == {"0": "length", "1": "error", "2": "length"}
        assert [outcome(run.trace, i) for i in (0, 2)] == [want[0], want[2]]
        left = run.trace.rows(1, "committed").position
        assert left.is_unique and len(left) >= len(run.trace.committed(1))
        assert run.cache.num_free_rows == run.cache.rows
        run.cache.check_integrity()


def test_invariant_25_exception_safety_of_choices_in_a_run() -> None:
    """A pass that the capture has seen, and one choice of which fails: nobody else has a row twice."""
    want = [outcome(cp.run(tiny(), PROMPTS[:3], **RUN, sampling=HOT, deterministic=True), i) for i in range(3)]
    choose_next = books.choose_next

    for in_decode in (True, False):

        def failing(state: SequenceState, *args: object, in_decode: bool = in_decode) -> int:
            is_decode = len(args) > 4  # a verify pass leaves is_draft out
            if state.request_id == 1 and state.num_generated > 4 and is_decode == in_decode:
                raise ValueError("no token is left")
            return choose_next(state, *args)

        with patch.object(books, "choose_next", failing):
            run = Watched(tiny(), PROMPTS[:3], deterministic=True, sampling=HOT, capture="STCZ").finished()
        assert run.trace.meta["finish"] == {"0": "length", "1": "error", "2": "length"}
        assert [outcome(run.trace, i) for i in (0, 2)] == [want[0], want[2]]
        assert run.trace.rows(1, "committed").position.is_unique


def test_invariant_25_exception_safety_where_something_passes() -> None:
    """An error that does not come again costs a pass and nothing else, at any pass of the run."""
    undisturbed = Watched(Spy(tiny()), PROMPTS[:3], deterministic=True, sampling=HOT, capture="STCZ").finished()
    want = [outcome(undisturbed.trace, i) for i in range(3)]
    for number in range(0, len(undisturbed.spy.calls), 4):
        for fault in ("nan", "error"):

            def plan(call: Call, number: int = number, fault: str = fault):
                return None if call.number != number else call.rows[:1] if fault == "nan" else MemoryError("once")

            run = Watched(Faulty(tiny(), plan), PROMPTS[:3], deterministic=True, sampling=HOT, capture="STCZ")
            run.finished()
            assert run.spy.num_faults == 1 and not run.trace.meta["errors"]
            assert [outcome(run.trace, i) for i in range(3)] == want


def test_invariant_25_exception_safety_of_who_comes_next() -> None:
    """NaN that a pass left behind without showing it: the request it ends hands on a clean row.

    In float64, whose attention is torch's: it reads slots of the span that no token has written.
    """
    settings = dict(deterministic=True, sampling=HOT, max_new_tokens=2 * CHUNK)
    want = [outcome(cp.run(tiny(torch.float64), PROMPTS[:3], **{**RUN, **settings}), i) for i in (0, 2)]
    poisoned = []

    def poison(call: Call) -> None:
        row = run.states[1].cache_row
        start = call.starts[call.rows.index(row)] if row in call.rows else 0
        if start > CHUNK and call.shape == (G, W) and not poisoned:  # where the next one's prefill does not reach
            poisoned.append(row)
            for held in (*call.cache.keys, *call.cache.values):
                held[row, :, start] = torch.nan

    run = Watched(Meddler(tiny(torch.float64), poison), PROMPTS[:3], **settings, max_batch=1, capture="STCZ")
    run.finished()
    assert poisoned and run.trace.meta["finish"] == {"0": "length", "1": "error", "2": "length"}
    assert [outcome(run.trace, i) for i in (0, 2)] == want
    run.cache.check_integrity()


def switches(model: PlainLM) -> tuple:
    """What a run may set while it runs, and must set back."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.model.modules())
    own = sum(len(p.fwd_hooks) for p in model.bridge.hook_dict.values())
    return (
        dict(os.environ), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), hooks, own,
        tuple(user_hooks(model.live)), torch.get_default_dtype(), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, model.bridge.training,
    )  # fmt: skip


def test_invariant_26_global_switches_restored() -> None:
    """Environment, grad mode, hooks and dtypes are as before: after a run, an error, a stream left or cancelled."""
    torch.set_num_threads(2)  # with one, none could be left behind; `conftest` restores the number
    model = loaded()

    def abandon() -> None:
        stream = cp.stream(model, PROMPTS, **{k: v for k, v in RUN.items() if k != "progress"}, capture="STCZ")
        next(stream)
        next(stream)
        stream.close()

    def cancel() -> None:
        stream = cp.stream(model, PROMPTS[:2], window=W, group=G, capacity=64, deterministic=True, capture="Z")
        next(stream)
        stream.cancel(0)
        assert {piece.finish for piece in stream} >= {"cancelled", "length"}

    def fail(path: str) -> None:
        inner = choose_path(model, path)[0]
        calls = 0
        layer = inner.model.model.layers[1] if path == "plain" else model.bridge.original_model.model.layers[1]

        def broken(*args: object) -> None:
            nonlocal calls
            calls += 1
            if calls > 9:
                raise RuntimeError("in the middle of a layer")

        handle = layer.mlp.register_forward_pre_hook(broken)
        with suppress(EngineError):
            cp.run(inner, PROMPTS[:3], **RUN, deterministic=True, path=path)
        handle.remove()
        assert calls > 9

    want = switches(model)
    cp.run(model, PROMPTS, **RUN, deterministic=[0], path="plain")
    assert switches(model) == want
    cp.run(model, PROMPTS[:2], **RUN, deterministic=[0], path="bridge", drafter=cp.drafters.EarlyExit(layer=1))
    assert switches(model) == want
    for disturb in (abandon, cancel, lambda: fail("plain"), lambda: fail("bridge")):
        disturb()
        assert switches(model) == want
    with torch.enable_grad():
        cp.run(model, PROMPTS[:1], **RUN)
        assert torch.is_grad_enabled()
    with torch.no_grad():
        cp.run(model, PROMPTS[:1], **RUN)
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_invariant_26_global_switches_in_the_middle(dtype: torch.dtype) -> None:
    """A stream that waits for its reader holds no switch: grad mode and environment are the reader's own. In float64,
    attention is torch's, which sets the number of threads."""
    torch.set_num_threads(2)
    model = loaded(dtype=dtype)
    stream = cp.stream(model, PROMPTS, window=W, group=G, capacity=64, max_new_tokens=6, deterministic=True)
    threads = torch.get_num_threads()
    for _ in stream:
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and torch.get_num_threads() == threads
    assert len(stream.trace().committed(0)) == 6
