"""Invariants 4 to 9: one pass of the verifier, in one shape, is a function of each request's own tokens."""

import random
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import cacheprobe as cp
from cacheprobe.engine import passes
from cacheprobe.engine.passes import EngineError, Entry, Pass
from cacheprobe.engine.shapes import narrow_widths
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.equality import bitwise
from cacheprobe.trace.recording.lens_reader import LENS_TILE
from tests.invariants.machines import Call, Meddler, Spy, rounding_by_shape, tiny, wide_bfloat16
from tests.invariants.runs import (
    CAPACITY,
    CHUNK,
    HOT,
    NEW,
    PROMPTS,
    RUN,
    SHAPES,
    G,
    W,
    Watched,
    kv_snapshot,
    outcome,
    same_rows,
    wrong_at,
)
from tests.shapes import fixed_pass, serving
from tests.tiny import VOCAB

pytestmark = pytest.mark.determinism

LENGTH = 22
"""Tokens of the texts below."""


def models() -> list[CachedLM]:
    return [tiny(), tiny(torch.bfloat16), tiny(path="bridge"), rounding_by_shape()]


def text(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def feed(
    model: CachedLM, cache: KVCache, tokens: Sequence[int], row: int, windows: Sequence[tuple[int, int]], slot: int = 1
) -> Tensor:
    """A text through verify-shaped passes: (start, real tokens) of each; dummies elsewhere. Logits [t, v]."""
    others = [r for r in range(cache.rows) if r != row][: G - 1]
    rows = [*others[:slot], row, *others[slot:]]
    logits = torch.zeros(len(tokens), model.d_vocab, dtype=model.dtype)
    for start, count in windows:
        ids = torch.zeros(G, W, dtype=torch.long)
        ids[slot, :count] = torch.tensor(tokens[start : start + count])
        starts = [start if r == row else 0 for r in rows]
        logits[start : start + count] = fixed_pass(model, ids, cache, rows, starts)[slot, :count]
    return logits


def full(length: int, first: int = 0) -> list[tuple[int, int]]:
    return [(start, min(W, length - start)) for start in range(first, length, W)]


def test_invariant_04_verifier_idempotence() -> None:
    """The same verify batch twice gives the same logits and the same cache, bit for bit."""
    count = 0

    def again(call: Call) -> None:
        nonlocal count
        if call.shape != (G, W):
            return
        before = [held.clone() for held in (*call.cache.keys, *call.cache.values)]
        out = spy.inner.forward(call.token_ids, call.cache, call.rows, call.starts, attention=call.attention)
        assert bitwise(out, call.out)
        assert same_rows(before, (*call.cache.keys, *call.cache.values))
        count += 1

    for model in models():
        spy = Meddler(model, again)
        trace = cp.run(spy, PROMPTS[:3], **RUN, sampling=HOT, deterministic=True)
        assert not trace.meta["errors"]
    assert count >= 12


def test_invariant_05_neighbour_independence_in_one_pass() -> None:
    """Logits, keys and values of a slot do not depend on which slot it is, nor on what stands in the others."""
    tokens = text(1)
    for model in models():
        cache = model.new_cache(G, CAPACITY)
        want = feed(model, cache, tokens, 0, full(LENGTH), slot=0)
        rows = kv_snapshot(cache, 0, LENGTH)
        for row, slot in ((1, 0), (0, G - 1), (2, 1)):
            cache = model.new_cache(G, CAPACITY)
            for held in (*cache.keys, *cache.values):
                held.normal_(0, 100)  # finite, and as large as anything a neighbour may leave behind
            assert bitwise(feed(model, cache, tokens, row, full(LENGTH), slot), want)
            assert same_rows(kv_snapshot(cache, row, LENGTH), rows)


def test_invariant_05_neighbour_independence_in_random_batches() -> None:
    """1 to 7 ready requests over groups of three, in rows that others have used: each as if it were alone."""
    model = rounding_by_shape()
    prompts = [text(seed, length) for seed, length in enumerate((5, 1, 9, 3, 12, 2, 7))]
    want = [outcome(cp.reference(model, [p], **RUN, sampling=HOT)) for p in prompts]
    for count, max_batch in ((2, 2), (7, 7), (7, 4)):
        order = random.Random(count).sample(range(7), count)
        settings = {**RUN, "sampling": HOT, "max_batch": max_batch}
        trace = cp.run(model, [prompts[i] for i in order], **settings, deterministic=True)
        assert [outcome(trace, place) for place in range(count)] == [want[i] for i in order]


def test_invariant_05_neighbour_independence_with_one_to_seventeen_ready() -> None:
    """Any number of ready requests over a group of four or more: passes are full of requests or of dummies, tokens the
    same. The window is odd, where most libraries have their exceptions."""
    prompts = [text(seed, 1 + seed % 5) for seed in range(17)]
    settings = dict(window=3, capacity=32, prefill_chunk=8, max_new_tokens=5, capture=None, progress=False)
    settings["group"] = serving(tiny(), 3, at_least=4, capacity=32)
    want = cp.reference(tiny(), prompts, **settings)
    for count in (*range(1, 10), 17):
        trace = cp.run(tiny(), prompts[:count], **settings, deterministic=True)
        assert [trace.committed(i) for i in range(count)] == [want.committed(i) for i in range(count)]
        assert [trace.logprobs(i) for i in range(count)] == [want.logprobs(i) for i in range(count)]


def test_invariant_05_neighbour_independence_of_dummies() -> None:
    """A dummy writes to no row that a request holds."""

    def look(call: Call) -> None:
        held = {state.cache_row for state in run.running}
        real = {row for row in call.rows if row in held}
        dummies = [row for row in call.rows if row not in held]
        assert all(call.cache.is_free(row) for row in dummies)
        if call.shape == (G, W):
            for row in real:
                assert call.fed(row)[0] > 0, "a request's row was used for a dummy, which starts at 0"

    run = Watched(Meddler(tiny(), look), PROMPTS, deterministic=True, max_batch=4)
    run.finished()
    assert not run.trace.meta["errors"]


def test_invariant_06_padding_independence() -> None:
    """What pads hold, and how many there are, changes nothing: neither of tokens nor of states."""
    want = [outcome(cp.reference(rounding_by_shape(), [p], **RUN, sampling=HOT)) for p in PROMPTS[:3]]
    for pad in (0, VOCAB - 1, 41):
        with patch.object(passes, "PAD_TOKEN_ID", pad):
            for draft_length in ("adaptive", 1):
                settings = {**RUN, "sampling": HOT, "draft_length": draft_length}
                trace = cp.run(rounding_by_shape(), PROMPTS[:3], **settings, deterministic=True)
                assert [outcome(trace, i) for i in range(3)] == want


def test_invariant_06_padding_independence_in_one_pass() -> None:
    """Rows before the pads have the same bits with one pad, with many, and with other pads."""
    tokens = text(2)
    for model in models():
        cache = model.new_cache(G, CAPACITY)
        want = feed(model, cache, tokens, 1, full(LENGTH))
        for count in range(1, W):
            for fill in (0, VOCAB - 1):
                padded = [*tokens[: 8 + count], *[fill] * (W - count)]
                logits = feed(model, cache, padded, 1, [(8, W)])
                assert bitwise(logits[8 : 8 + count], want[8 : 8 + count])


def test_invariant_07_window_offset_independence() -> None:
    """Logits, keys and values at a position are the same, whatever row of whatever window computed them."""
    tokens = text(3)
    splits = [
        [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4), (20, 2)],
        [(0, 1), *full(LENGTH, 1)],
        [(0, 3), (3, 1), (4, 2), *full(LENGTH, 6)],
        [(start, 1) for start in range(LENGTH)],
    ]
    for model in (*models(), wide_bfloat16()):
        results = []
        for windows in splits:
            cache = model.new_cache(G, CAPACITY)
            results.append((feed(model, cache, tokens, 2, windows), kv_snapshot(cache, 2, LENGTH)))
        for logits, rows in results[1:]:
            assert bitwise(logits, results[0][0]) and same_rows(rows, results[0][1])


def test_invariant_07_window_offset_independence_of_states() -> None:
    """Mismatches at other rows make other windows; states at a position stay, though another slot computed them."""
    model = rounding_by_shape()
    want = cp.reference(model, PROMPTS[:2], **RUN, sampling=HOT)
    slots: dict[int, set[int]] = {}
    for places in ([0, 2, 1], [2, None], [1, 1, 0]):
        settings = {**RUN, "sampling": HOT, "drafter": wrong_at(want, places)}
        trace = cp.run(model, PROMPTS[:2], **settings, deterministic=True)
        assert [outcome(trace, i) for i in range(2)] == [outcome(want, i) for i in range(2)]
        for _, event in trace.events().query("phase == 'verify' and request_id == 0").iterrows():
            for n in range(len(event.committed_token_ids)):
                slots.setdefault(event.draft_start + n, set()).add(n)
    assert max(map(len, slots.values())) >= 3, "no position was ever computed in three different slots"


def test_invariant_07_window_offset_independence_of_shapes() -> None:
    """The slots that a verified position attends over depend on the position alone: not on where a window begins."""
    prompts = [[3, *range(5, 63)], [7] * 50]
    settings = {**SHAPES, "capacity": 192, "max_new_tokens": NEW, "sampling": HOT}
    want = cp.reference(tiny(), prompts, **settings, progress=False)
    spans: dict[int, set[int]] = {}

    def look(call: Call) -> None:
        if call.shape == (G, W):
            assert call.attention is not None and call.attention.spans is not None
            for start, pieces in zip(call.starts, call.attention.spans.pieces, strict=True):
                for piece in pieces:
                    for t in range(piece.first, piece.end):
                        spans.setdefault(start + t, set()).add(piece.span)

    for places in ([0, 2, 1], [2, None], [1, 1, 0]):
        run = Watched(Meddler(tiny(), look), prompts, deterministic=True, drafter=wrong_at(want, places), **settings)
        run.finished()
    assert spans and all(held == {-(-(position + 1) // 64) * 64} for position, held in spans.items())
    assert {64, 128} <= set().union(*spans.values())


def test_invariant_07_window_offset_independence_of_the_bridge() -> None:
    """On the bridge, whose attention is one call for a batch, a verify pass attends over the whole capacity."""
    spy = Spans(tiny(path="bridge"))
    cp.run(spy, PROMPTS[:2], **RUN, deterministic=True, capture=None)
    assert {s for s, call in zip(spy.spans, spy.calls, strict=True) if call.shape == (G, W)} == {CAPACITY}


def test_invariant_08_causality() -> None:
    """Changing candidate j changes no row before it, and does change its own."""
    tokens = text(4)
    for model in models():
        cache = model.new_cache(G, CAPACITY)
        feed(model, cache, tokens, 1, full(8))
        want = feed(model, cache, tokens, 1, [(8, W)])[8 : 8 + W]
        rows = kv_snapshot(cache, 1, 8 + W)
        for j in range(1, W):
            other = list(tokens)
            other[8 + j] = (other[8 + j] + 1) % VOCAB
            logits = feed(model, cache, other, 1, [(8, W)])[8 : 8 + W]
            assert bitwise(logits[:j], want[:j]) and not bitwise(logits[j], want[j])
            before = [held[:, : 8 + j] for held in kv_snapshot(cache, 1, 8 + W)]
            assert same_rows(before, [held[:, : 8 + j] for held in rows])


class Spans(Spy):
    """Notes over how many slots attention runs in every pass."""

    def __init__(self, inner: CachedLM) -> None:
        super().__init__(inner)
        self.spans: list[int] = []

    def answer(self, call: Call) -> Tensor:
        self.spans.append(StagedCache(call.cache, call.rows, call.starts, call.shape[1], call.attention).span)
        return super().answer(call)


def test_invariant_09_fixed_shape() -> None:
    """Every verify pass is G x W, or G x 2 if all feed 1 or 2 tokens and the trial allows it; every verified prompt's
    pass is 1 x chunk."""
    for settings in (dict(), dict(max_batch=2), dict(draft_length=1), dict(drafter=wrong_at_random())):
        spy = Spans(tiny())
        run = Watched(spy, PROMPTS, sampling=HOT, deterministic=True, **settings).finished()
        narrow = 2 if 2 in narrow_widths(spy.inner, run.config) else W
        events = run.trace.events()
        of_phase = events[events.phase == "prefill"]
        assert set(zip(of_phase.batch_rows, of_phase.batch_slots, strict=True)) == {(1, CHUNK)}
        for _, of_pass in events[events.phase == "verify"].groupby("step"):
            width = narrow if of_pass.draft_token_ids.map(len).max() < 2 else W
            assert set(zip(of_pass.batch_rows, of_pass.batch_slots, strict=True)) == {(G, width)}
        wide = {call.shape for call in spy.calls if call.shape[1] > 1}
        assert {(1, CHUNK)} < wide <= {(G, W), (G, 2), (1, CHUNK)}
        assert all(call.cache.capacity == CAPACITY for call in spy.calls)
        assert {span for call, span in zip(spy.calls, spy.spans, strict=True) if call.shape[1] > 1} == {CAPACITY}


def wrong_at_random() -> cp.drafters.Scripted:
    rng = random.Random(9)
    return cp.drafters.Scripted(lambda state: [rng.randrange(VOCAB) for _ in range(rng.randrange(4))])


def test_invariant_09_fixed_shape_or_an_error() -> None:
    """A pass that does not fit its shape raises; it is never run in another one."""
    run = Watched(tiny(), PROMPTS, deterministic=True, capture=None)
    cache = tiny().new_cache(G + 1, CAPACITY)
    states = run.states[: G + 1]
    for state in states:
        state.cache_row = cache.allocate()
    entries = [Entry(state, (1,), 0, True) for state in states]
    with pytest.raises(EngineError, match=rf"{G + 1} requests.*do not fit a verify pass of {G} x {W}"):
        Pass(cache, 0, "verify", entries, W, G)
    with pytest.raises(EngineError, match=rf"up to {W + 1} tokens do not fit"):
        Pass(cache, 0, "verify", [Entry(states[0], (1,) * (W + 1), 0, True)], W, G)
    with pytest.raises(EngineError, match="do not fit"):  # no row is left for dummies
        Pass(cache, 0, "verify", entries[:1], W, G)


def test_invariant_09_fixed_shape_also_for_the_readings() -> None:
    """Z is read in tiles of one height; a reading does not depend on what else is in its tile."""
    heights: list[int] = []

    class Watching(LogitLens):
        name = "watching"

        def logits(self, model: CachedLM, states: Tensor, layers: Tensor) -> Tensor:
            heights.append(len(states))
            return model.read_out(states)

    cp.run(tiny(), PROMPTS * 3, **RUN, lens=Watching(), deterministic=True)
    assert len(heights) > 1 and set(heights) == {LENS_TILE}
    trace = cp.reference(wide_bfloat16(), PROMPTS[:2], **RUN, sampling=HOT)
    random_batch = cp.run(wide_bfloat16(), [*PROMPTS[2:], *PROMPTS[:2]], **RUN, sampling=HOT, deterministic=[3, 4])
    for i in range(2):
        assert outcome(trace, i).readings == outcome(random_batch, 3 + i).readings
