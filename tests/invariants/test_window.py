"""Invariants 10 to 14 and 16: what one verification commits, what it takes back, and what it leaves in the cache."""

import random
from collections import Counter

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Observer, StepRecord
from cacheprobe.engine.committer import Committer
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.acceptance import num_accepted
from tests.invariants.machines import Call, Meddler, rounding_by_shape, tiny
from tests.invariants.runs import (
    HOT,
    NEW,
    PROMPTS,
    AtCommit,
    G,
    W,
    Watched,
    babbler,
    future,
    kv_snapshot,
    reference_rows,
    same_rows,
    wrong_at,
)
from tests.twins.equivalence import num_accepted_slowly

pytestmark = pytest.mark.determinism


def test_invariant_10_progress() -> None:
    """Every request of a verify pass gains at least one token there, so there are at most as many passes as tokens."""
    want, _ = reference_rows(tiny(), PROMPTS, sampling=HOT)
    drafters = [None, babbler(3), wrong_at(want, [0]), wrong_at(want, [2, 0]), cp.drafters.Scripted(lambda state: [])]
    for drafter in drafters:
        for draft_length in ("adaptive", 1, 2):
            settings = dict(drafter=drafter, sampling=HOT, draft_length=draft_length, max_batch=4)
            run = Watched(tiny(), PROMPTS, deterministic=True, **settings)
            for number, _ in enumerate(run):
                assert number < 5 * NEW, "no end in sight"
            passes = run.trace.events().query("phase == 'verify'")
            assert (passes.committed_token_ids.map(len) >= 1).all()
            assert (passes.groupby("request_id").size() < NEW).all()
            assert [len(run.trace.committed(i)) for i in range(5)] == [NEW] * 5


class Verdicts(Observer):
    """Keeps what every request had said before each verdict, and what it says after it."""

    run: Watched

    def __init__(self) -> None:
        self.before: dict[int, list[int]] = {}
        self.seen: list[tuple] = []

    def on_step(self, record: StepRecord) -> None:
        for verdict in record.verdicts:
            state = self.run.states[verdict.request_id]
            self.seen.append((verdict, self.before[state.request_id], list(state.generated)))
            assert not state.draft, "a candidate outlived its verdict"
        for state in self.run.states:
            self.before[state.request_id] = list(state.generated)


def test_invariant_11_accept_rule() -> None:
    """With a first mismatch at m, exactly m candidates and the verifier's own token are committed; nothing after."""
    want, _ = reference_rows(tiny(), PROMPTS, sampling=HOT)
    num_misses: Counter = Counter()
    for places in ([0, 1, 2, None], [2, None, 0], [None], [1]):
        seen = Verdicts()
        drafter = wrong_at(want, places)
        run = Watched(tiny(), PROMPTS, seen, deterministic=True, sampling=HOT, drafter=drafter).finished()
        for verdict, before, after in seen.seen:
            said = want.committed(verdict.request_id)
            expected = said[len(before) :][: W if verdict.num_accepted == len(verdict.draft_token_ids) else None]
            m = num_accepted_slowly(list(verdict.draft_token_ids), expected[: len(verdict.draft_token_ids)])
            assert verdict.num_accepted == m
            assert after == before + expected[: m + 1] and len(after) == len(before) + m + 1
            num_misses[m] += 1
        assert run.trace.committed(0) == want.committed(0)
    assert min(num_misses[m] for m in range(W)) > 0


def test_invariant_11_accept_rule_by_hand() -> None:
    """The rule itself, over every pair of short sequences of two tokens."""
    for size in range(4):
        for bits in range(4**size):
            draft = [(bits >> i) & 1 for i in range(size)]
            targets = [(bits >> (size + i)) & 1 for i in range(size)] + [1]
            assert num_accepted(draft, targets) == num_accepted_slowly(draft, targets)


def test_invariant_12_context_refeed() -> None:
    """Row 0 of every window is the newest committed token at its own position; a decode is fed the newest token.

    After a mismatch in the last row, that is the verifier's token: the one that replaced the candidate.
    """
    want, _ = reference_rows(tiny(), PROMPTS[:4], sampling=HOT)
    looked = Counter()

    def look(call: Call) -> None:
        for state in run.running:
            if state.cache_row not in call.rows or not state.generated:
                continue
            start, fed = call.fed(state.cache_row)
            if call.shape == (G, W):
                assert start == len(state.token_ids) - 1 and fed[0] == state.token_ids[-1]
                assert fed[1 : 1 + len(state.draft)] == state.draft
                looked["verify"] += 1
            elif call.shape[1] == 1:
                text = [*state.token_ids, *state.draft]
                assert (fed[0], start) == (text[-1], len(text) - 1)
                looked["decode"] += 1

    for drafter in (wrong_at(want, [2]), wrong_at(want, [0, 1]), None, cp.drafters.EarlyExit(layer=1)):
        spy = Meddler(tiny(), look)
        run = Watched(spy, PROMPTS[:4], deterministic=True, sampling=HOT, drafter=drafter)
        run.finished()
        assert not run.trace.meta["errors"]
        assert [run.trace.committed(i) for i in range(4)] == [want.committed(i) for i in range(4)]
    assert looked["verify"] > 20 and looked["decode"] > 20


def kv_watch(model: CachedLM, want_rows: list, counts: Counter) -> AtCommit:
    """At every commit, the rows below the last_committed_position against a fresh replay by the verifier."""

    def look(run: Watched, state: SequenceState) -> None:
        ours = kv_snapshot(run.cache, state.cache_row, state.last_committed_position)
        theirs = [held[:, : state.last_committed_position] for held in want_rows[state.request_id]]
        assert same_rows(ours, theirs), (state.request_id, state.last_committed_position)
        names = run.cache.ledger.names(state.cache_row, state.last_committed_position)
        prompt = state.request.num_prompt_tokens
        assert names == ["prefill"] * prompt + ["verified"] * (state.last_committed_position - prompt)
        counts[state.request_id] += 1

    return AtCommit(look)


def test_invariant_13_kv_provenance() -> None:
    """After every commit, all rows below the last committed position are prefill's or the verifier's, as in replay."""
    for model in (rounding_by_shape(), tiny(torch.bfloat16)):
        want, rows = reference_rows(model, PROMPTS[:4], sampling=HOT)
        for drafter in (None, wrong_at(want, [0, 2, 1, None]), cp.drafters.EarlyExit(layer=0)):
            counts: Counter = Counter()
            watch = kv_watch(model, rows, counts)
            run = Watched(model, PROMPTS[:4], watch, deterministic=True, sampling=HOT, drafter=drafter)
            run.finished()
            assert [run.trace.committed(i) for i in range(4)] == [want.committed(i) for i in range(4)]
            assert sum(counts.values()) >= 16


def test_invariant_13_kv_provenance_survives_poisoned_drafts() -> None:
    """Noise in every row that a decode writes: candidates still match, and nothing that is committed changes."""
    model = tiny()
    want, rows = reference_rows(model, PROMPTS[:4], sampling=HOT)
    generator = torch.Generator().manual_seed(0)
    poisoned = 0

    def poison(call: Call) -> None:
        nonlocal poisoned
        if call.shape[1] != 1:
            return
        for row, start in zip(call.rows, call.starts, strict=True):
            for held in (*call.cache.keys, *call.cache.values):
                noise = torch.randn(held[row, :, start].shape, generator=generator)
                held[row, :, start] += 0.05 * noise
            poisoned += 1

    counts: Counter = Counter()
    watch = kv_watch(model, rows, counts)
    run = Watched(Meddler(model, poison), PROMPTS[:4], watch, deterministic=True, sampling=HOT).finished()
    assert [run.trace.committed(i) for i in range(4)] == [want.committed(i) for i in range(4)]
    assert [run.trace.logprobs(i) for i in range(4)] == [want.logprobs(i) for i in range(4)]
    assert poisoned > 30 and run.trace.num_drafted > run.trace.num_rolled_back


def test_invariant_14_frontier() -> None:
    """After every commit the cache holds prompt + output - 1 rows; the newest token has none of its own yet."""
    commits = 0

    def look(run: Watched, state: SequenceState) -> None:
        nonlocal commits
        assert int(run.cache.lengths[state.cache_row]) == state.request.num_prompt_tokens + state.num_generated - 1
        commits += 1

    want, _ = reference_rows(tiny(), PROMPTS, sampling=HOT)
    for drafter in (None, wrong_at(want, [0, 2, 1, None]), cp.drafters.EarlyExit(layer=0)):
        settings = dict(deterministic=[0, 2, 4], sampling=HOT, drafter=drafter)
        run = Watched(tiny(), PROMPTS, AtCommit(look), **settings)
        for _ in run:
            run.cache.check_integrity()
            for state in run.running:
                held = int(run.cache.lengths[state.cache_row])
                assert held <= state.last_committed_position + len(state.draft) + 1
                assert len(state.draft) or held == state.last_committed_position
    assert commits > 100


def test_invariant_16_isolation() -> None:
    """Two requests of opposite fate in one pass: the rollback of one leaves the other's rows, tokens and length."""
    prompts = [PROMPTS[4], PROMPTS[1], PROMPTS[0]]
    model = rounding_by_shape()
    want, _ = reference_rows(model, prompts, sampling=HOT)
    fates: set[tuple[int, ...]] = set()
    apply_verdict = Committer.apply_verdict
    left_alone = 0

    def watched(self: Committer, state: SequenceState, verdict) -> None:
        nonlocal left_alone
        others = [s for s in run.running if s is not state]
        before = [
            (list(s.token_ids), list(s.draft), int(self.cache.lengths[s.cache_row]), s.is_ready(W)) for s in others
        ]
        kept = [
            kv_snapshot(self.cache, s.cache_row, length) for s, (_, _, length, _) in zip(others, before, strict=True)
        ]
        apply_verdict(self, state, verdict)
        after = [
            (list(s.token_ids), list(s.draft), int(self.cache.lengths[s.cache_row]), s.is_ready(W)) for s in others
        ]
        assert before == after
        again = [
            kv_snapshot(self.cache, s.cache_row, length) for s, (_, _, length, _) in zip(others, before, strict=True)
        ]
        assert all(same_rows(a, b) for a, b in zip(kept, again, strict=True))
        left_alone += len(others)

    def script(state: SequenceState) -> list[int]:
        return future(want, state, 0 if (state.request_id + state.num_generated) % 2 else None)

    Committer.apply_verdict = watched
    try:
        drafter = cp.drafters.Scripted(script)
        run = Watched(model, prompts, deterministic=True, sampling=HOT, drafter=drafter)
        run.finished()
    finally:
        Committer.apply_verdict = apply_verdict
    assert [run.trace.committed(i) for i in range(3)] == [want.committed(i) for i in range(3)]
    for _, step in run.trace.events().query("phase == 'verify'").groupby("step"):
        fates.add(tuple(sorted(set(step.num_accepted))))
    assert any(fate[0] == 0 and fate[-1] == W - 1 for fate in fates) and left_alone > 10


def test_invariant_16_isolation_from_those_who_leave() -> None:
    """A neighbour that is cancelled in the middle of its draft changes no row, token or length of the others."""
    model = rounding_by_shape()
    want, rows = reference_rows(model, PROMPTS[:3], sampling=HOT)
    rng = random.Random(2)
    midway = 0
    for _ in range(4):
        counts: Counter = Counter()
        run = Watched(model, PROMPTS[:3], kv_watch(model, rows, counts), deterministic=True, sampling=HOT)
        moment = rng.randrange(1, 9)
        for number, _ in enumerate(run):
            if number == moment and not run.states[1].finish:
                midway += bool(run.states[1].draft)
                run.states[1].is_cancel_requested = True
        assert [run.trace.committed(i) for i in (0, 2)] == [want.committed(i) for i in (0, 2)]
    assert midway
