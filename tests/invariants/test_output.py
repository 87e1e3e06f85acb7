"""Invariants 17 to 20: what leaves, where it ends, and what it was drawn from."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Observer, Request, SamplingParams
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import choose_path
from tests.invariants.machines import Spy, rounding_by_shape, tiny
from tests.invariants.runs import HOT, NEW, PROMPTS, RUN, SHAPES, W, Watched, babbler, future, outcome, wrong_at
from tests.tiny import VOCAB, hf_model, loaded
from tests.twins.equivalence import choose_token_slowly, sample_token_slowly

pytestmark = pytest.mark.determinism

BYTES = [0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0x20, 0xF0]
"""A letter, a space, and parts of characters of two to four bytes."""


def in_bytes(token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
    """Text of a tokenizer whose tokens are bytes: many a character spans tokens, and some never become whole."""
    return bytes(BYTES[t % len(BYTES)] for t in token_ids).decode("utf-8", "replace")


def in_letters(token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
    return "".join(chr(ord("a") + t % 26) for t in token_ids)


def speaking(decode, model: CachedLM | None = None) -> Spy:
    spy = Spy(model or tiny())
    spy.decode = decode
    return spy


class Growth(Observer):
    """Fails as soon as any request's committed tokens are not an extension of what they were."""

    run: Watched

    def __init__(self) -> None:
        self.known: dict[int, list[int]] = {}
        self.looks = 0

    def look(self, *args: object) -> None:
        for state in self.run.states:
            before = self.known.get(state.request_id, [])
            assert state.token_ids[: len(before)] == before
            self.known[state.request_id] = list(state.token_ids)
            self.looks += 1

    before_forward = after_forward = on_choice = on_commit = on_rollback = on_abandon = on_preempt = on_step = look


def test_invariant_17_monotone_release() -> None:
    """Committed tokens only ever grow: through rollbacks, preemptions and failures of neighbours."""
    for settings in (
        dict(),
        dict(max_kv_tokens=30),
        dict(drafter=babbler(4)),
        dict(drafter=babbler(5), max_kv_tokens=30),
    ):
        growth = Growth()
        run = Watched(rounding_by_shape(), PROMPTS, growth, deterministic=[0, 1, 3], sampling=HOT, **settings)
        run.finished()
        assert growth.looks > 100 and run.trace.num_rolled_back > 0
        assert [growth.known[i] for i in range(5)] == [PROMPTS[i] + run.trace.committed(i) for i in range(5)]


def test_invariant_17_monotone_release_of_a_stream() -> None:
    """Nothing unverified leaves: at every piece, tokens and text so far are a prefix of the oracle's."""
    model = speaking(in_bytes, rounding_by_shape())
    settings = {**SHAPES, "max_new_tokens": 20, "sampling": HOT}
    want = cp.reference(model, PROMPTS[:4], **settings, progress=False, capture=None)
    assert any("�" in in_bytes(want.committed(i)[:n]) for i in range(4) for n in range(20))
    wrong = cp.drafters.Scripted(lambda state: [(t + 1) % VOCAB for t in future(want, state)])
    for drafter in (None, wrong, cp.drafters.FastPath()):
        for max_kv_tokens in (None, 48):
            stream = cp.stream(
                model, PROMPTS[:4], **settings, deterministic=True, drafter=drafter, max_kv_tokens=max_kv_tokens
            )
            said: dict[int, list[int]] = {i: [] for i in range(4)}
            shown = dict.fromkeys(range(4), "")
            late = 0
            for piece in stream:
                said[piece.request_id] += piece.token_ids
                shown[piece.request_id] += piece.text
                final = want.committed(piece.request_id)
                assert said[piece.request_id] == final[: len(said[piece.request_id])]
                assert in_bytes(final).startswith(shown[piece.request_id])
                late += len(shown[piece.request_id]) < len(in_bytes(said[piece.request_id]))
            assert said == {i: want.committed(i) for i in range(4)}
            assert shown == {i: stream.trace().text(i) for i in range(4)} and late


def cut(tokens: list[int], stops: Sequence[int], most: int) -> tuple[list[int], str]:
    """What stop tokens and a limit leave of an endless output, by their definition."""
    for n in range(1, most + 1):
        if tokens[n - 1] in stops:
            return tokens[:n], "stop"
    return tokens[:most], "length"


def test_invariant_18_finish_correctness() -> None:
    """Wherever the stop token or the limit falls, output ends exactly there, and a drafted stop ends nothing."""
    model = tiny()
    prompts = PROMPTS[:2]
    endless = cp.reference(model, prompts, **{**RUN, "max_new_tokens": 16}, sampling=HOT, capture=None)
    reasons = set()
    for index in (0, 1, 2, 3, 4, 5, 11):
        stop = endless.committed(0)[index]
        for most in (1, 4, 5, 6, NEW):
            sampling = SamplingParams(temperature=HOT.temperature, seed=HOT.seed, stop_token_ids=(stop,))
            drafters = {
                "right": cp.drafters.Scripted(lambda state: future(endless, state)),
                "early stop": cp.drafters.Scripted(lambda state, stop=stop: [*future(endless, state)[:1], stop, 1]),
                "fast path": None,
            }
            names = ["right", "early stop"] if most == NEW else ["fast path"]
            for name in names:
                settings = {**RUN, "max_new_tokens": most, "sampling": sampling, "capture": None}
                trace = cp.run(model, prompts, **settings, drafter=drafters[name], deterministic=True)
                for i in range(2):
                    want, reason = cut(endless.committed(i), [stop], most)
                    assert trace.committed(i) == want and trace.meta["finish"][str(i)] == reason
                    reasons.add((reason, len(want)))
    assert {reason for reason, _ in reasons} == {"stop", "length"} and len(reasons) > 6


def test_invariant_18_finish_correctness_of_stop_texts() -> None:
    """A text that ends the output may span tokens and windows; a text that only a draft completes ends nothing."""
    model = speaking(in_letters)
    endless = cp.reference(model, PROMPTS[:2], **{**RUN, "max_new_tokens": 16}, sampling=HOT, capture=None)
    text = in_letters(endless.committed(0))
    for start in range(0, 9, 2):
        stop = text[start : start + 4]
        sampling = SamplingParams(temperature=HOT.temperature, seed=HOT.seed, stop=(stop, "zzzzz"))
        settings = {**RUN, "max_new_tokens": 16, "sampling": sampling}
        trace = cp.run(model, PROMPTS[:2], **settings, drafter=wrong_at(endless, [1, None]), deterministic=True)
        end = text.index(stop) + 4
        assert trace.text(0) == text[:end] and trace.meta["finish"]["0"] == "stop"
        want = cp.reference(model, PROMPTS[:2], **settings)
        assert [outcome(trace, i) for i in range(2)] == [outcome(want, i) for i in range(2)]


@cache
def clean_logits(tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits [t, v] of a text by the bridge's own forward, without our cache."""
    with torch.inference_mode():
        return loaded().bridge.forward(torch.tensor([tokens]), return_type="logits")[0]


def test_invariant_19_sampling() -> None:
    """The token at a position is a slow sampler's over clean logits, with noise of that position, in every phase."""
    for sampling in (SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=1.5, seed=2**40 + 3)):
        runs = [cp.run(tiny(), PROMPTS[:3], **RUN, sampling=sampling, deterministic=d) for d in (True, False)]
        runs.append(cp.run(tiny(), PROMPTS[:3], **RUN, sampling=sampling, drafter=babbler(1)))
        for trace in runs:
            for i in range(3):
                text = PROMPTS[i] + trace.committed(i)
                logits = clean_logits(tuple(text))
                for p in range(len(PROMPTS[i]), len(text)):
                    want = sample_token_slowly(logits[p - 1], sampling.temperature, sampling.seed, p)
                    assert text[p] == want
        assert runs[0].num_rolled_back == 0, "decode and verify disagree about the noise of a position"


def test_invariant_19_sampling_leaves_global_generators_alone() -> None:
    """No global generator is read or moved."""
    states = (torch.get_rng_state(), np.random.get_state()[1].copy())
    settings = {**RUN, "sampling": SamplingParams(temperature=1.0), "seed": 5}
    first = cp.run(tiny(), PROMPTS, **settings, deterministic=[0, 1])
    assert torch.equal(torch.get_rng_state(), states[0]) and (np.random.get_state()[1] == states[1]).all()
    torch.manual_seed(99)
    np.random.seed(99)
    random.seed(99)  # of whose state nothing is said above: beartype draws from it, in these tests
    again = cp.run(tiny(), PROMPTS, **settings, deterministic=[0, 1])
    assert [again.committed(i) for i in range(5)] == [first.committed(i) for i in range(5)]
    assert len({tuple(first.committed(i)[:3]) for i in range(5)}) > 1


def test_invariant_19_sampling_of_several() -> None:
    """n samples are n requests with seeds of their own; requests without a seed have different ones too."""
    sampling = SamplingParams(temperature=1.0, seed=9, n=4)
    together = cp.run(tiny(), PROMPTS[:2], **RUN, sampling=sampling, deterministic=True)
    seeds = [request.sampling.seed for request in together.requests]
    assert len(set(seeds[:4])) == 4 and seeds[0] == 9
    each = [Request(r.prompt_token_ids, replace(sampling, seed=r.sampling.seed, n=1)) for r in together.requests]
    apart = cp.run(tiny(), each, **RUN, deterministic=True)
    assert [outcome(together, i) for i in range(8)] == [outcome(apart, i) for i in range(8)]
    unseeded = cp.run(tiny(), [PROMPTS[0]] * 4, **RUN, sampling=SamplingParams(temperature=1.0), deterministic=True)
    for trace in (together, unseeded):
        assert len({tuple(trace.committed(i)) for i in range(4)}) == 4


def test_invariant_19_sampling_breaks_ties_alike() -> None:
    """Exact ties go to the lowest id in prefill, decode and verify, in float32 and bfloat16."""
    half = VOCAB // 2
    for dtype in (torch.float32, torch.bfloat16):
        live = hf_model(dtype=dtype)
        with torch.no_grad():
            live.lm_head.weight[half : 2 * half] = live.lm_head.weight[:half]
        model = choose_path(cp.load_model(live), "plain")[0]
        settings = {**RUN, "capture": None}
        trace = cp.run(model, PROMPTS[:3], **settings, deterministic=[0, 1])
        assert trace.num_rolled_back == 0
        for i in range(3):
            assert all(t < half or t == 2 * half for t in trace.committed(i))
        margins = trace.events().margin_nats
        assert (margins == 0).any(), "no tie was met"


PROCESSORS = [
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(temperature=1.0, seed=4, top_k=5, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, seed=5, top_p=0.7, min_p=0.05, repetition_penalty=0.7),
]


def test_invariant_20_processor_parity() -> None:
    """Penalty and filters see the committed prefix of each position: a slow sampler over clean logits agrees."""
    for sampling in PROCESSORS:
        for drafter in (None, babbler(6)):
            trace = cp.run(tiny(), PROMPTS[:2], **RUN, sampling=sampling, drafter=drafter, deterministic=True)
            for i in range(2):
                text = PROMPTS[i] + trace.committed(i)
                logits = clean_logits(tuple(text))
                for p in range(len(PROMPTS[i]), len(text)):
                    assert text[p] == choose_token_slowly(logits[p - 1], sampling, text[:p], p)
    assert text != PROMPTS[1] + cp.run(tiny(), PROMPTS[1], **RUN, capture=None).committed(0)


def test_invariant_20_processor_parity_after_rollbacks() -> None:
    """Drafts that would be penalised, were they ever said, leave no mark; nor does a preemption in between."""
    model = rounding_by_shape()
    for sampling in PROCESSORS[:2]:
        want = cp.reference(model, PROMPTS[:3], **RUN, sampling=sampling)

        def spoil(state: SequenceState, want: cp.Trace = want) -> list[int]:
            said = future(want, state)
            return [*said[:1], *said[3:4], *said[2:3]]  # tokens that come a little later

        for settings in (
            dict(drafter=cp.drafters.Scripted(spoil)),
            dict(max_kv_tokens=28),
            dict(draft_length="adaptive"),
        ):
            trace = cp.run(model, PROMPTS[:3], **RUN, sampling=sampling, deterministic=True, **settings)
            assert [outcome(trace, i) for i in range(3)] == [outcome(want, i) for i in range(3)]
            assert trace.num_rolled_back and ("max_kv_tokens" not in settings or trace.meta["preemptions"])
    assert W == 4
