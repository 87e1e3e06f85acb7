"""Hostile drafters change the cost and never the tokens, nor a bit of a deterministic request's states."""

from functools import cache

import pytest
import torch

import cacheprobe as cp
from cacheprobe.engine.passes import EngineError
from cacheprobe.kvcache.sequence import SequenceState
from tests.shapes import serving
from tests.tiny import PROMPTS, SMALL, VOCAB, loaded
from tests.twins.equivalence import sample_token_slowly

pytestmark = pytest.mark.determinism

STOP = 30


@cache
def windowed(window: int) -> dict:
    """Settings of a run with this window, and a group that serves with it here."""
    return {**SMALL, "window": window, "group": serving(loaded(), window)}


@cache
def oracle(window: int, **extra) -> cp.Trace:
    return cp.reference(loaded(), PROMPTS, **{**windowed(window), **extra})


def future(trace: cp.Trace, state: SequenceState, wrong_at: int | None) -> list[int]:
    """What the oracle says next, with one token wrong."""
    known = trace.committed(state.request_id)[state.num_generated :]
    if wrong_at is not None and wrong_at < len(known):
        known = [*known[:wrong_at], (known[wrong_at] + 1) % VOCAB, *known[wrong_at + 1 :]]
    return known


@pytest.mark.parametrize("window", [1, 2, 3, 4, 8])
def test_all_right_costs_least(window: int) -> None:
    want = oracle(window)
    drafter = cp.drafters.Scripted(lambda state: future(want, state, None))
    trace = cp.run(loaded(), PROMPTS, **windowed(window), drafter=drafter, deterministic=True)
    assert [trace.committed(i) for i in range(5)] == [want.committed(i) for i in range(5)]
    assert [trace.digest(i) for i in range(5)] == [want.digest(i) for i in range(5)]
    assert trace.num_rolled_back == 0
    passes = trace.events().query("phase == 'verify' and request_id == 0")
    assert len(passes) == -(-19 // window)  # the first of 20 tokens comes from the prefill


@pytest.mark.parametrize(
    ("window", "wrong_at"), [(w, at) for w in (2, 3, 4, 8) for at in range(w - 1)], ids=lambda value: str(value)
)
def test_wrong_at_each_draft(window: int, wrong_at: int) -> None:
    """A first mismatch at every row, the last one included, whose off-by-one is the field's classic."""
    want = oracle(window)
    drafter = cp.drafters.Scripted(lambda state: future(want, state, wrong_at))
    trace = cp.run(loaded(), PROMPTS, **windowed(window), drafter=drafter, deterministic=True)
    for i in range(5):
        assert trace.committed(i) == want.committed(i) and trace.digest(i) == want.digest(i)
    verify = trace.events().query("phase == 'verify'")
    full = verify[verify.draft_token_ids.map(len) == window - 1]
    assert len(full) and (full.num_accepted == wrong_at).all()
    assert (full.num_rolled_back == window - 1 - wrong_at).all()
    assert full.recovered_token_id.notna().all() and full.bonus_token_id.isna().all()


@pytest.mark.parametrize(
    "script", [lambda s: [0] * 9, lambda s: [STOP] * 9, lambda s: [VOCAB - 1, STOP, 5], lambda s: []]
)
def test_nonsense_and_stop_tokens(script) -> None:
    """Drafted stop tokens never end a request; the verifier's own do, exactly where they stand."""
    stops = cp.SamplingParams(stop_token_ids=(STOP,))
    plain = oracle(4)
    stop_at = {i: plain.committed(i).index(STOP) for i in range(5) if STOP in plain.committed(i)}
    assert stop_at, "no request meets the stop token; the test would show nothing"
    want = oracle(4, sampling=stops)
    trace = cp.run(
        loaded(), PROMPTS, **windowed(4), drafter=cp.drafters.Scripted(script), sampling=stops, deterministic=True
    )
    for i in range(5):
        expected = plain.committed(i)[: stop_at[i] + 1] if i in stop_at else plain.committed(i)
        assert trace.committed(i) == want.committed(i) == expected
        assert trace.digest(i) == want.digest(i)
        assert trace.meta["finish"][str(i)] == ("stop" if i in stop_at else "length")
        assert len(trace.rows(i, "committed")) == len(PROMPTS[i]) + len(expected) - 1


def test_accepted_stop_token_ends_mid_window() -> None:
    plain = oracle(8)
    stops = cp.SamplingParams(stop_token_ids=(STOP,))
    drafter = cp.drafters.Scripted(lambda state: future(plain, state, None))
    trace = cp.run(loaded(), PROMPTS, **windowed(8), drafter=drafter, sampling=stops)
    ended = trace.events().query("finish == 'stop' and phase == 'verify'")
    assert len(ended)
    for _, event in ended.iterrows():
        assert event.committed_token_ids[-1] == STOP and STOP not in event.committed_token_ids[:-1]


def test_a_drafter_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(EngineError, match=f"token {VOCAB}.*vocabulary of {VOCAB}"):
        cp.run(loaded(), PROMPTS, **SMALL, drafter=cp.drafters.Scripted(lambda state: [VOCAB]))


def test_noise_belongs_to_the_tokens_own_position() -> None:
    """In prefill, decode and verify alike: a slow sampler over clean logits, with noise keyed by the position where the
    token came to stand, gives every committed token. (Were verify off by one, the oracle would be off with it.)"""
    sampling = cp.SamplingParams(temperature=1.0, seed=11)
    model = loaded()
    for trace in (oracle(4, sampling=sampling), cp.run(model, PROMPTS, **windowed(4), sampling=sampling)):
        for i, prompt in enumerate(PROMPTS):
            text = prompt + trace.committed(i)
            with torch.inference_mode():
                logits = model.bridge.forward(torch.tensor([text]), return_type="logits")[0]
            for position in range(len(prompt), len(text)):
                assert text[position] == sample_token_slowly(logits[position - 1], 1.0, 11, position)
