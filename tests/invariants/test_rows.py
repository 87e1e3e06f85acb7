"""Invariants 15 and 21 to 23: cache rows are accounted for, and always written by one and the same schedule."""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.records import Observer, Request, SamplingParams
from cacheprobe.kvcache.ledger import CacheIntegrityError
from tests.invariants.machines import Call, Faulty, Spy, rounding_by_shape, tiny, wide_bfloat16
from tests.invariants.runs import (
    CHUNK,
    HOT,
    NEW,
    PROMPTS,
    RUN,
    W,
    Watched,
    babbler,
    kv_snapshot,
    outcome,
    random_batch,
    reference_rows,
    same_rows,
)
from tests.tiny import VOCAB

pytestmark = pytest.mark.determinism


def test_invariant_15_no_leak() -> None:
    """After every round: one row for each request in flight, as long as it needs, and all free in the end."""
    rng = random.Random(6)
    events: Counter = Counter()
    for trial in range(6):
        requests, _, settings = random_batch(rng, Request(PROMPTS[0], HOT, is_deterministic=True))
        moments = (2, 5, 9) if trial % 2 else ()
        bad_pass = rng.randrange(3, 20) if trial % 3 == 0 else None

        def plan(call: Call, bad_pass: int | None = bad_pass):
            return RuntimeError("for once") if call.number == bad_pass else None

        run = Watched(Faulty(tiny(), plan), requests, **settings)
        for number, _ in enumerate(run):
            if number in moments and run.running:
                rng.choice(run.running).is_cancel_requested = True
            run.cache.check_integrity()
            rows = [state.cache_row for state in run.running]
            assert len(set(rows)) == len(rows) == run.cache.rows - run.cache.num_free_rows
            assert all(not state.finish for state in run.running)
            assert int(run.cache.lengths.sum()) == sum(int(run.cache.lengths[row]) for row in rows)
            for state in run.running:
                assert int(run.cache.lengths[state.cache_row]) <= len(state.token_ids) + len(state.draft)
        assert run.cache.num_free_rows == run.cache.rows and not int(run.cache.lengths.sum())
        events["preempted"] += len(run.trace.meta["preemptions"])
        events["cancelled"] += "cancelled" in run.trace.meta["finish"].values()
        events["failed passes"] += run.spy.num_faults
    assert events["preempted"] and events["cancelled"] and events["failed passes"]


def test_invariant_15_no_double_free() -> None:
    """A row that was released cannot be released again; a row that is taken is given to nobody else."""
    cache = tiny().new_cache(3, 16)
    rows = [cache.allocate() for _ in range(3)]
    assert sorted(rows) == [0, 1, 2]
    with pytest.raises(CacheIntegrityError, match="all 3 cache rows are taken"):
        cache.allocate()
    cache.release(1)
    with pytest.raises(CacheIntegrityError, match="released twice"):
        cache.release(1)
    assert cache.allocate() == 1


LENGTHS = sorted({1, W - 1, W, W + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1})


def prompts_of_all_lengths() -> list[list[int]]:
    return [[(7 * length + i) % VOCAB for i in range(length)] for length in LENGTHS]


def test_invariant_21_prefill_determinism() -> None:
    """A prompt is read in passes that depend on itself alone: of every length, alone or with all the others."""
    prompts = prompts_of_all_lengths()
    spy = Spy(tiny())
    trace = cp.run(spy, prompts, **{**RUN, "max_new_tokens": 2, "capture": None}, deterministic=True)
    passes = trace.events().query("phase == 'prefill'")
    assert passes.groupby("step").size().max() == 1
    expected = [CHUNK] * sum(-(-length // CHUNK) for length in LENGTHS)
    assert [call.shape for call in spy.calls if call.shape[0] == 1 and call.shape[1] > 1] == [(1, n) for n in expected]
    for length in (1, 3):  # and when they are never verified: together, as they come
        spy = Spy(tiny())
        cp.run(spy, prompts[:length], **{**RUN, "max_new_tokens": 2, "capture": None})
        assert spy.calls[0].shape == (length, max(LENGTHS[:length]))


class PromptWatch(Observer):
    """At the first token of every deterministic request, the rows of its prompt against those `wanted`."""

    run: Watched

    def __init__(self, wanted: dict[tuple[int, ...], list[Tensor]]) -> None:
        self.wanted, self.count = wanted, 0

    def on_commit(self, request_id: int, step: int, start: int, *args: object) -> None:
        state = self.run.states[request_id]
        prompt = state.request.prompt_token_ids
        if state.request.is_deterministic and start == len(prompt):
            ours = kv_snapshot(self.run.cache, state.cache_row, start)
            assert same_rows(ours, [held[:, :start] for held in self.wanted[prompt]])
            self.count += 1


def test_invariant_21_prefill_determinism_of_bits() -> None:
    """The first token's log-probability, and every row of the prompt, are those of the prompt alone."""
    model = rounding_by_shape()
    prompts = prompts_of_all_lengths()
    want, rows = reference_rows(model, prompts, max_new_tokens=2, sampling=HOT)
    others = [Request([9] * 20, arrival_step=1), Request([1] * 3)]  # read freely, before and beside them
    for order in (range(len(prompts)), range(len(prompts) - 1, -1, -1)):
        requests = [*others, *(Request(prompts[i], HOT, is_deterministic=True) for i in order)]
        watch = PromptWatch({tuple(prompt): rows[i] for i, prompt in enumerate(prompts)})
        run = Watched(model, requests, watch, max_new_tokens=2).finished()
        assert watch.count == len(prompts)
        assert [run.trace.logprobs(2 + n) for n in range(len(prompts))] == [want.logprobs(i) for i in order]


def test_invariant_21_prefill_determinism_of_groups() -> None:
    """Prompts that share a pass of a fixed group: each as if its neighbours were dummies."""
    prompts = prompts_of_all_lengths()[:6]
    for model in (rounding_by_shape(), wide_bfloat16()):
        settings = {**RUN, "prefill_group": 2, "max_new_tokens": 2, "sampling": HOT, "capture": "S"}
        trace = cp.run(model, prompts, **settings, deterministic=True)
        assert set(trace.events().query("phase == 'prefill'").batch_rows) == {2}
        for i, prompt in enumerate(prompts):
            assert outcome(trace, i) == outcome(cp.reference(model, [prompt], **settings))


def test_invariant_21_prefill_determinism_without_pads() -> None:
    """Chunks that end with the prompt: the same shapes and bits in a batch, and after a preemption."""
    prompts = prompts_of_all_lengths()
    settings = dict(pad_prefill=False, prefill_group=1, max_new_tokens=6)
    spy = Spy(tiny())
    cp.run(spy, prompts, **{**RUN, **settings, "capture": None}, deterministic=True)
    expected = [n for length in LENGTHS for n in [*[CHUNK] * (length // CHUNK), length % CHUNK] if n]
    read = [call.shape for call in spy.calls if call.shape[0] == 1]
    assert [shape for shape in read if shape[1] > 1] == [(1, n) for n in expected if n > 1]
    for model in (rounding_by_shape(), wide_bfloat16()):
        alone = [outcome(cp.reference(model, [prompt], **{**RUN, **settings, "sampling": HOT})) for prompt in prompts]
        requests = [Request([9] * 20, arrival_step=1), *(Request(p, HOT, is_deterministic=True) for p in prompts)]
        run = Watched(model, requests, max_kv_tokens=36, capture="STCZ", **settings).finished()
        assert run.trace.meta["preemptions"]
        assert [outcome(run.trace, 1 + i) for i in range(len(prompts))] == alone


class Shares(Observer):
    """Notes who took rows over from whom."""

    run: Watched

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def on_shared_prompt(self, request_id: int, step: int, source_id: int) -> None:
        self.pairs.append((request_id, source_id))


def test_invariant_22_prefix_cache_rule() -> None:
    """Rows of a shared prompt come from the same schedule only: never from a request that is not verified."""
    model = rounding_by_shape()
    prompt, other = PROMPTS[4], PROMPTS[0]
    short = SamplingParams(temperature=0.9, seed=7, max_new_tokens=2)
    seeds = [SamplingParams(temperature=0.9, seed=seed) for seed in range(3)]
    requests = [
        Request(prompt, seeds[0]),  # not verified, and first
        Request(prompt, seeds[1], is_deterministic=True),
        Request(prompt, seeds[0]),
        Request(prompt, seeds[2], is_deterministic=True),
        Request(prompt, short, is_deterministic=True),  # leaves early
        Request(other, seeds[1], is_deterministic=True),
        Request(prompt, seeds[1], is_deterministic=True, arrival_step=6),
        Request(prompt, seeds[2], arrival_step=6),
    ]
    verified = [i for i, request in enumerate(requests) if request.is_deterministic]
    want = cp.reference(model, [requests[i] for i in verified], **RUN)
    for settings in (dict(), dict(max_batch=3), dict(max_kv_tokens=60)):
        shares = Shares()
        run = Watched(model, requests, shares, capture="STCZ", **settings).finished()
        assert [outcome(run.trace, i) for i in verified] == [outcome(want, n) for n in range(len(verified))]
        assert shares.pairs, "nothing was shared"
        assert all(requests[a].is_deterministic == requests[b].is_deterministic for a, b in shares.pairs)
        assert all(requests[a].prompt == requests[b].prompt for a, b in shares.pairs)


def test_invariant_22_prefix_cache_rule_when_the_donor_has_left() -> None:
    """A donor that has finished, or lost its row, is none: later requests read the prompt themselves."""
    requests = [
        Request(PROMPTS[0], SamplingParams(max_new_tokens=1), is_deterministic=True),
        Request(PROMPTS[1], HOT, is_deterministic=True),
        Request(PROMPTS[0], HOT, is_deterministic=True, arrival_step=5),
        Request(PROMPTS[0], HOT, is_deterministic=True, arrival_step=9),
    ]
    shares = Shares()
    run = Watched(rounding_by_shape(), requests, shares, capture="STCZ").finished()
    want = cp.reference(rounding_by_shape(), requests, **RUN)
    assert shares.pairs == [(3, 2)]
    assert [outcome(run.trace, i) for i in range(4)] == [outcome(want, i) for i in range(4)]


class Preemptions(Observer):
    """Notes what a preempted request was doing: drafting, or between two windows."""

    run: Watched

    def __init__(self) -> None:
        self.drafts: list[int] = []
        self._open = 0

    def on_abandon(self, request_id: int, step: int, start: int, end: int) -> None:
        self._open = end - start

    def on_preempt(self, request_id: int, step: int) -> None:
        assert not self.run.states[request_id].draft
        self.drafts.append(self._open)
        self._open = 0

    def on_commit(self, *args: object) -> None:
        self._open = 0


def test_invariant_23_preemption() -> None:
    """After a preemption, in a draft or between two, the output goes on as if nothing had happened: to the last bit."""
    for model, limits in ((rounding_by_shape(), (27, 34)), (tiny(torch.bfloat16), (31, 32))):
        want, rows = reference_rows(model, PROMPTS, sampling=HOT, capture="SZ")
        drafts: list[int] = []
        for max_kv_tokens in limits:
            checked = 0
            preemptions = Preemptions()
            settings = dict(deterministic=True, sampling=HOT, capture="SZ", max_kv_tokens=max_kv_tokens)
            run = Watched(model, PROMPTS, preemptions, **settings)
            for _ in run:
                for state in run.running:
                    ours = kv_snapshot(run.cache, state.cache_row, state.last_committed_position)
                    assert same_rows(
                        ours, [held[:, : state.last_committed_position] for held in rows[state.request_id]]
                    )
                    checked += 1
            drafts += preemptions.drafts
            assert run.trace.meta["preemptions"] and checked > 20
            assert [outcome(run.trace, i) for i in range(5)] == [outcome(want, i) for i in range(5)]
            assert run.cache.num_free_rows == run.cache.rows
        assert 0 in drafts and max(drafts) > 0, "preemptions came only in drafts, or only between them"


def test_invariant_23_preemption_under_hostile_drafts() -> None:
    """The same with a drafter that is always wrong, with n samples of one prompt, and with sampling of all kinds."""
    model = rounding_by_shape()
    sampling = SamplingParams(temperature=1.1, seed=2, n=3, top_k=30, repetition_penalty=1.2)
    want = cp.reference(model, PROMPTS[:2], **RUN, sampling=sampling)
    settings = {**RUN, "max_kv_tokens": 30, "sampling": sampling}
    trace = cp.run(model, PROMPTS[:2], **settings, deterministic=True, drafter=babbler(8))
    assert trace.meta["preemptions"]
    assert [outcome(trace, i) for i in range(6)] == [outcome(want, i) for i in range(6)]


def test_invariant_23_preemption_of_the_others() -> None:
    """A request that is never verified also goes on where it was: in float32 with the same tokens."""
    plain = cp.run(tiny(), PROMPTS, **RUN, sampling=HOT)
    tight = cp.run(tiny(), PROMPTS, **RUN, sampling=HOT, max_kv_tokens=30)
    assert tight.meta["preemptions"]
    assert [tight.committed(i) for i in range(5)] == [plain.committed(i) for i in range(5)]
    for i in range(5):
        assert tight.rows(i, "committed").position.tolist() == list(range(len(PROMPTS[i]) + NEW - 1))
