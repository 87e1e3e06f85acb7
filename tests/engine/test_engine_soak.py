"""Episodes of random traffic with everything at once: settings, drafters, limits, failures, cancellations."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import Request, SamplingParams
from cacheprobe.engine.passes import EngineError
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from tests.invariants.machines import Call, Faulty, Spy, rounding_by_shape, tiny, wide_bfloat16
from tests.invariants.runs import Watched, outcome

pytestmark = pytest.mark.determinism

LETTERS = [0x61, 0xC3, 0xA9, 0x62, 0x63, 0xE2, 0x82, 0xAC]
SHAPES = [(1, 4), (2, 2), (2, 4), (3, 4), (4, 2), (4, 3), (6, 2)]
"""Windows and groups."""


def text(token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
    return bytes(LETTERS[t % 8] for t in token_ids).decode("utf-8", "replace")


def some_sampling(rng: random.Random, vocab: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=rng.randrange(1, 16),
        temperature=rng.choice([0.0, 0.7, 1.2]),
        seed=rng.choice([None, rng.randrange(2**40)]),
        top_k=rng.choice([0, 5, 40]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        stop=rng.choice([(), ("ab", "bca")]),
        stop_token_ids=rng.choice([(), (5,), tuple(range(0, vocab, 11))]),
        n=rng.choice([1, 1, 1, 3]),
    )


def some_requests(rng: random.Random, vocab: int) -> list[Request]:
    """Up to seven, over few prompts, so that some are the same; of lengths around the window and the chunk."""
    lengths = [rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20]) for _ in range(4)]
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in lengths]
    return [
        Request(
            rng.choice(prompts),
            some_sampling(rng, vocab),
            is_deterministic=rng.random() < 0.6,
            arrival_step=rng.choice([0, 0, 2, 5, rng.randrange(30)]),
        )
        for _ in range(rng.randrange(1, 8))
    ]


def some_drafter(rng: random.Random, vocab: int, seed: int) -> Any:
    def script(state: SequenceState) -> list[int]:
        own = random.Random(f"{seed} {state.request_id} {state.num_generated}")
        return [own.randrange(vocab) for _ in range(own.randrange(6))]

    early = cp.drafters.EarlyExit(layer=rng.randrange(2))
    return rng.choice([None, None, cp.drafters.Scripted(script), early, cp.drafters.FastPath()])


def episode(seed: int) -> Counter:
    """One run, looked at after every round; every deterministic request is compared with the oracle to the last bit."""
    rng = random.Random(seed)
    model: CachedLM = rng.choice([rounding_by_shape, rounding_by_shape, wide_bfloat16, lambda: tiny(torch.bfloat16)])()
    requests = some_requests(rng, model.d_vocab)
    window, group = rng.choice(SHAPES)
    shapes = dict(window=window, group=group, capacity=64, prefill_chunk=8, prefill_group=rng.choice([1, 1, 2]))
    shapes["pad_prefill"] = shapes["prefill_group"] > 1 or seed % 2 == 0
    longest = max(len(r.prompt) + r.sampling.max_new_tokens for r in requests) + window
    settings = dict(
        max_batch=rng.choice([1, 2, 3, 64]),
        max_kv_tokens=rng.choice([None, longest, longest + rng.randrange(30)]),
        draft_length=rng.choice([None, 1, 2, "adaptive"]),
        acceptance=rng.choice(["equality", "rejection"]),
        drafter=some_drafter(rng, model.d_vocab, seed),
        seed=seed,
    )
    bad_passes = set(rng.sample(range(1, 60), rng.choice([0, 0, 2, 5]))) if len(requests) > 1 else set()
    fault = rng.choice(["nan", "error"])
    cancels = {rng.randrange(1, 20) for _ in range(rng.choice([0, 0, 1, 3]))}

    def plan(call: Call) -> BaseException | list[int] | None:
        if call.number not in bad_passes:
            return None
        mine = [row for row in call.rows if not call.cache.is_free(row)]
        return [rng.choice(mine)] if fault == "nan" else RuntimeError("for once")

    spy = Faulty(model, plan)
    spy.decode = text
    run = Watched(spy, requests, capture="STCZ", **shapes, **settings)
    try:
        for number, _ in enumerate(run):
            assert number < 1000, "no end in sight"
            run.cache.check_integrity()
            rows = [state.cache_row for state in run.running]
            assert len(set(rows)) == len(rows) == run.cache.rows - run.cache.num_free_rows
            if number in cancels:
                rng.choice(run.states).is_cancel_requested = True
    except EngineError:
        assert all(state.error for state in run.states)
        return Counter(error=len(run.states))
    finally:
        assert run.cache.num_free_rows == run.cache.rows
    finishes = [run.trace.meta["finish"][str(r.request_id)] for r in run.prepared.plan.requests]
    for request, finish in zip(run.prepared.plan.requests, finishes, strict=True):
        check_tables(run.trace, request, finish)
        if request.is_deterministic and run.trace.committed(request.request_id):
            check_against_oracle(run.trace, request, finish, model, shapes)
    preempted, shared = len(run.trace.meta["preemptions"]), len({tuple(r.prompt) for r in requests}) < len(requests)
    return Counter(finishes) + Counter(preempted=preempted, shared=shared, faults=spy.num_faults)


def check_tables(trace: cp.Trace, request: Request, finish: str) -> None:
    """One canonical row for each position, a role for every row, a log-probability for every token."""
    i = request.request_id
    said, rows = trace.committed(i), trace.rows(i)
    positions = sorted(rows[rows.status == "committed"].position)
    assert len(set(positions)) == len(positions) and (rows.role != "").all()
    if finish in ("stop", "length"):
        assert positions == list(range(request.num_prompt_tokens + len(said) - 1))
        assert len(said) <= request.sampling.max_new_tokens
    assert len(trace.logprobs(i)) == len(said)


def check_against_oracle(trace: cp.Trace, request: Request, finish: str, model: CachedLM, shapes: dict) -> None:
    i = request.request_id
    asked = replace(request, prompt=request.prompt_token_ids, sample_of=None)
    is_cut = finish in ("error", "cancelled")
    if is_cut:
        asked = replace(asked, sampling=replace(asked.sampling, max_new_tokens=len(trace.committed(i))))
    spy = Spy(model)
    spy.decode = text
    want = outcome(cp.reference(spy, [asked], **shapes, progress=False))
    ours = outcome(trace, i)
    if is_cut:  # after an error rows may be missing, and after the end of a cut request nothing was said
        assert (ours.tokens, ours.logprobs) == (want.tokens, want.logprobs)
        assert finish == "error" or ours.digest == want.digest
    else:
        assert ours == want


def test_random_episodes() -> None:
    seen = sum((episode(seed) for seed in range(12)), Counter())
    assert {"length", "stop", "cancelled", "preempted", "shared", "faults"} <= set(+seen)


@pytest.mark.slow
def test_many_random_episodes() -> None:
    seen = sum((episode(seed) for seed in range(100, 300)), Counter())
    assert {"length", "stop", "cancelled", "error", "preempted", "shared", "faults"} <= set(+seen)
