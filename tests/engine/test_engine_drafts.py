"""How long drafts are, how candidates are judged, and the log-probabilities of what was committed."""

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import torch
from scipy import stats

import cacheprobe as cp
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.engine import committer
from cacheprobe.models.plain.lm import PlainLM
from tests.invariants.machines import rounding_by_shape, tiny
from tests.invariants.runs import CHUNK, HOT, NEW, PROMPTS, RUN, Watched, babbler, future, outcome
from tests.tiny import VOCAB, loaded
from tests.twins.equivalence import target_scores_slowly

pytestmark = pytest.mark.determinism

LONG = {**RUN, "window": 8, "group": 2, "max_new_tokens": 24}


def lengths(trace: cp.Trace, request_id: int = 0) -> list[int]:
    """Of the drafts that were verified, in order."""
    return trace.events().query(f"phase == 'verify' and request_id == {request_id}").draft_token_ids.map(len).tolist()


@pytest.mark.parametrize(("draft_length", "kind"), [(1, "scripted"), (3, "fast path"), (50, "scripted")])
def test_no_draft_is_longer_than_asked(draft_length: int, kind: str) -> None:
    want = cp.reference(rounding_by_shape(), PROMPTS[:2], **LONG, sampling=HOT)
    drafter = cp.drafters.Scripted(lambda state: future(want, state)) if kind == "scripted" else None
    settings = {**LONG, "sampling": HOT, "draft_length": draft_length}
    trace = cp.run(rounding_by_shape(), PROMPTS[:2], **settings, drafter=drafter, deterministic=True)
    longest = min(draft_length, 7)
    assert [outcome(trace, i) for i in range(2)] == [outcome(want, i) for i in range(2)]
    for i in range(2):
        assert max(lengths(trace, i)) == longest
        if kind == "scripted":  # all right, so every pass commits one more than it was asked to draft
            assert set(lengths(trace, i)[:-1]) == {longest}


def test_each_row_of_a_batch_keeps_what_it_earned() -> None:
    """Always right, wrong at once, wrong at the third: each commits its own length in every pass, and takes as many
    passes as it would alone, none of them for itself."""
    want = cp.reference(tiny(), PROMPTS[:3], **LONG)
    wrong_at = {0: None, 1: 0, 2: 2}
    drafter = cp.drafters.Scripted(lambda state: future(want, state, wrong_at[state.request_id]))
    settings = {**LONG, "group": 3, "drafter": drafter, "deterministic": True}
    together = cp.run(tiny(), PROMPTS[:3], **settings)
    events = together.events().query("phase == 'verify'")
    for i in range(3):
        assert outcome(together, i) == outcome(want, i)
        earned = (events[events.request_id == i].num_accepted + 1).tolist()
        step = {0: 8, 1: 1, 2: 3}[i]
        assert earned[:-1] == [step] * len(earned[:-1]) and len(earned) == -(-(24 - 1) // step)
    assert events.step.nunique() == 23  # of the slowest one alone: nobody else's pass is one of its own


def test_a_closed_draft_is_verified_as_it_is() -> None:
    trace = cp.run(tiny(), PROMPTS[:2], **RUN, drafter=cp.drafters.Scripted(lambda state: []))
    assert set(lengths(trace)) == {0} and len(lengths(trace)) == NEW - 1


# -- log-probabilities


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    """Before temperature and filters, in every phase and by every way to commit; close(1e-5): another order of sums."""
    sampling = SamplingParams(temperature=1.3, seed=3, top_k=20, repetition_penalty=1.4)
    runs = [cp.run(tiny(), PROMPTS[:3], **RUN, sampling=sampling, drafter=babbler(3))]
    runs += [
        cp.run(tiny(), PROMPTS[:3], **RUN, sampling=sampling, deterministic=d, max_kv_tokens=40) for d in (False, True)
    ]
    runs += [cp.run(tiny(), [PROMPTS[0]] * 3, **RUN, sampling=sampling, deterministic=True)]
    for trace in runs:
        for i, request in enumerate(trace.requests):
            text = [*request.prompt_token_ids, *trace.committed(i)]
            with torch.inference_mode():
                logits = loaded().bridge.forward(torch.tensor([text]), return_type="logits")[0]
            first = request.num_prompt_tokens
            nats = logits.double().log_softmax(-1)[range(first - 1, len(text) - 1), text[first:]]
            assert len(trace.logprobs(i)) == NEW
            assert (torch.tensor(trace.logprobs(i)) - nats).abs().max() < 1e-4
    assert any(trace.meta["preemptions"] for trace in runs)


# -- rejection


def drafted_run(model, prompts, drafter, **settings) -> cp.Trace:
    return cp.run(model, prompts, **{**RUN, "acceptance": "rejection", "drafter": drafter, **settings})


def test_rejection_does_not_touch_deterministic_requests() -> None:
    """They are judged by equality whatever the others are, and their candidates drawn with the choice's own noise."""
    model = rounding_by_shape()
    want = cp.reference(model, PROMPTS, **RUN, sampling=HOT)
    for drafter in (cp.drafters.EarlyExit(layer=1), babbler(7)):
        trace = drafted_run(model, PROMPTS, drafter, sampling=HOT, deterministic=[0, 3], max_kv_tokens=48)
        for i in (0, 3):
            assert outcome(trace, i) == outcome(want, i)
        assert [len(trace.committed(i)) for i in range(5)] == [NEW] * 5


def test_rejection_at_temperature_0_is_equality() -> None:
    want = cp.reference(tiny(), PROMPTS, **RUN)
    trace = drafted_run(tiny(), PROMPTS, cp.drafters.EarlyExit(layer=0))
    assert [trace.committed(i) for i in range(5)] == [want.committed(i) for i in range(5)]
    assert trace.num_rolled_back


def test_rejection_says_the_same_again() -> None:
    """Chances are keyed: the same run twice is the same, rolled back and preempted alike."""
    settings = dict(sampling=HOT, max_kv_tokens=34, draft_length="adaptive")
    a, b = (drafted_run(tiny(), PROMPTS, cp.drafters.EarlyExit(layer=0), **settings) for _ in range(2))
    assert [outcome(a, i) for i in range(5)] == [outcome(b, i) for i in range(5)]
    assert a.num_rolled_back and a.meta["preemptions"]


def test_rejection_accepts_more_than_equality() -> None:
    """What it is for: a drafter that samples on its own is right as often as the distributions overlap."""
    sampling = SamplingParams(temperature=1.5, seed=2)
    drafter = cp.drafters.EarlyExit(layer=1)
    settings = {**RUN, "sampling": sampling, "capture": None, "drafter": drafter, "max_new_tokens": 30}
    shares = {}
    for acceptance in ("equality", "rejection"):
        trace = cp.run(tiny(), PROMPTS, **settings, acceptance=acceptance)
        shares[acceptance] = 1 - trace.num_rolled_back / trace.num_drafted
    assert 0 < shares["equality"] < shares["rejection"] < 1


def exact_pairs(
    prompt: list[int], sampling: SamplingParams, model: PlainLM | None = None
) -> dict[tuple[int, int], float]:
    """Probability of every pair of second and third output tokens, by the target's own distributions."""

    def probs(text: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits = (model or loaded()).bridge.forward(torch.tensor([text]), return_type="logits")[0, -1]
        scores = np.array(target_scores_slowly(logits, sampling, text))
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()

    pairs: Counter = Counter()
    for a in np.flatnonzero(first := probs(prompt)):
        for b in np.flatnonzero(second := probs([*prompt, int(a)])):
            for c in np.flatnonzero(third := probs([*prompt, int(a), int(b)])):
                pairs[int(b), int(c)] += float(first[a] * second[b] * third[c])
    return dict(pairs)


def chance(counts: Counter, exact: dict, total: int) -> float:
    """Of counts that are no nearer to these probabilities, if the probabilities are right. Rare cells are counted
    together."""
    common = [pair for pair, p in exact.items() if total * p >= 5]
    seen, expected = [counts[pair] for pair in common], [total * exact[pair] for pair in common]
    return float(stats.chisquare([*seen, total - sum(seen)], [*expected, total - sum(expected)]).pvalue)


@pytest.mark.parametrize("is_broken", [False, True], ids=["as it is", "every candidate accepted"])
def test_rejection_keeps_the_distribution(is_broken: bool) -> None:
    """Pairs of drafted tokens against their exact probabilities, over many seeds; an unfair rule is told apart."""
    sampling = SamplingParams(temperature=1.0, top_k=3, max_new_tokens=4, n=500)
    settings = dict(window=4, group=8, capacity=32, prefill_chunk=CHUNK, max_batch=64, capture=None, progress=False)
    always = lambda *args: (True, args[2])  # noqa: E731
    with patch.object(committer, "accept_or_recover", always if is_broken else committer.accept_or_recover):
        trace = cp.run(
            tiny(), [Request(PROMPTS[0], sampling)], **settings, seed=4,
            acceptance="rejection", drafter=cp.drafters.EarlyExit(layer=0),
        )  # fmt: skip
    counts = Counter((trace.committed(i)[1], trace.committed(i)[2]) for i in range(sampling.n))
    found = chance(counts, exact_pairs(PROMPTS[0], sampling), sampling.n)
    assert (found < 1e-12) if is_broken else (found > 5e-5)
    assert is_broken or 0 < trace.num_rolled_back < trace.num_drafted


def test_a_script_is_no_distribution() -> None:
    """Candidates that were not drawn count as certain: they stay with the target's own probability of them."""
    sampling = SamplingParams(temperature=1.0, seed=3)
    drafter = cp.drafters.Scripted(lambda state: [VOCAB - 1] * 3)
    run = Watched(tiny(), PROMPTS[:2], acceptance="rejection", drafter=drafter, sampling=sampling).finished()
    assert run.trace.num_rolled_back > 0 and not run.trace.meta["errors"]
