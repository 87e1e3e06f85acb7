"""Prompts of verified and invariant requests share prefill passes, where each has the bits of a pass by itself."""

import copy
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Request
from cacheprobe.engine import shapes
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.passes import Pass
from cacheprobe.engine.shapes import Hooked, batches_prompts
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from tests.compiled import on_loops
from tests.invariants.machines import in_loops as model
from tests.invariants.machines import plant
from tests.invariants.runs import HOT, outcome
from tests.tiny import hf_model

pytestmark = pytest.mark.determinism

RUN: dict[str, Any] = dict(capacity=192, max_new_tokens=4, progress=False, sampling=HOT)
DRAFTED: dict[str, Any] = {**RUN, "drafter": cp.drafters.NGram()}


def texts(lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(len(lengths))
    return [[rng.randrange(60) for _ in range(length)] for length in lengths]


LENGTHS = (3, 20, 70, 5, 66, 18, 150, 40, 64, 12, 65, 1)
"""Around the lengths whose attention runs in loops (16 and 64), a step of spans (64) and a chunk (128)."""


def heights(trace: cp.Trace) -> list[int]:
    """How many prompts each prefill pass had."""
    prefill = trace.events().query("phase == 'prefill'")
    return prefill[prefill.batch_rows > 0].groupby("step").batch_rows.first().tolist()


def want(of: Any, prompts: list[Any], **settings: Any) -> list[Any]:
    trace = cp.reference(of, prompts, **{**RUN, **settings})
    return [outcome(trace, i) for i in range(len(prompts))]


# -- the bits


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.bfloat16, RUN), (torch.float32, {**RUN, "determinism": "invariant"}), (torch.bfloat16, DRAFTED)],
    ids=["verify", "invariant", "drafted"],
)
def test_prompts_that_share_a_pass_have_the_bits_of_the_reference(dtype: torch.dtype, settings: dict[str, Any]) -> None:
    of, prompts = model(dtype), texts(LENGTHS)
    trace = cp.run(of, prompts, deterministic=True, **settings)
    ways = {name: value for name, value in settings.items() if name == "determinism"}
    window = trace.fingerprint["window"]
    assert [outcome(trace, i) for i in range(len(prompts))] == want(of, prompts, window=window, **ways)
    assert len(heights(trace)) < len(prompts) < sum(heights(trace))  # one prompt has two chunks
    assert trace.meta["self_checks"]["differences"] == []


def test_a_prompt_that_goes_on_from_a_snapshot_attends_as_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 40 tokens cross a step of spans, beside a prompt whose tokens attend over one span."""
    of, prompts = model(torch.bfloat16), texts([90, 70, 68, 66, 50])
    cached = cp.kv_snapshot(of, prompts[0][:50], capacity=192)
    requests: list[Any] = [Request(prompts[0], HOT, cached=cached, own_fingerprint=True), *prompts[1:]]
    own, spans = Pass.attention, []

    def note(*given: Any, **named: Any) -> Any:
        made = own(*given, **named)
        spans.append([[piece.span for piece in pieces] for pieces in made.spans.pieces])
        return made

    monkeypatch.setattr(Pass, "attention", note)
    trace = cp.run(of, requests, deterministic=True, **RUN)
    assert heights(trace) == [5] and sorted(spans[0]) == [[64], [64, 128], [128], [128], [128]]
    assert cp.verify(trace, of, progress=False).is_equal


def test_a_snapshot_with_hidden_slots_is_read_alone() -> None:
    of, prompts = model(torch.bfloat16), texts([40, 40, 40, 40])
    cached = cp.kv_snapshot(of, prompts[0][:20], capacity=192)
    hidden = Request(prompts[0], HOT, cached=cached.masked([3, 4], layers=1, heads=0), own_fingerprint=True)
    requests: list[Any] = [hidden, *prompts[1:]]
    trace = cp.run(of, requests, deterministic=True, **RUN)
    assert sorted(heights(trace)) == [1, 3] and cp.verify(trace, of, progress=False).is_equal


def test_a_prompt_whose_logits_are_not_numbers_ends_alone() -> None:
    """Its row of the embedding becomes NaN after all trials of the model."""
    loaded, prompts = on_loops(cp.load_model(copy.deepcopy(hf_model("llama")))), texts([20, 21, 22, 23, 24])
    of = choose_path(loaded, "plain")[0]
    cp.run(of, prompts, deterministic=True, **RUN)
    with torch.no_grad():
        loaded.bridge.original_model.get_input_embeddings().weight[96] = torch.nan
    prompts[2][5] = 96
    with pytest.warns(RuntimeWarning, match="request 2 ended with an error"):
        trace = cp.run(of, prompts, deterministic=True, **RUN)
    assert "hold NaN" in trace.meta["errors"]["2"] and len(trace.meta["errors"]) == 1
    others = [prompt for i, prompt in enumerate(prompts) if i != 2]
    assert [outcome(trace, i) for i in (0, 1, 3, 4)] == want(of, others)


@pytest.mark.parametrize(("family", "window"), [("mistral", 6), ("qwen3", None)])
def test_other_families_and_sliding_windows(family: str, window: int | None) -> None:
    of, prompts = on_loops(cp.load_model(hf_model(family, torch.bfloat16, window=window))), texts(LENGTHS)
    trace = cp.run(of, prompts, deterministic=True, **RUN)
    assert max(heights(trace)) > 4 and cp.verify(trace, of, progress=False).is_equal


def test_heads_are_recorded_as_by_the_reference() -> None:
    """With hooks of heads the model's modules run."""
    of, prompts = model(torch.bfloat16), texts(LENGTHS)
    capture = cp.CaptureConfig(sites="S", heads=("q", "z"))
    trace = cp.run(of, prompts, deterministic=True, capture=capture, **RUN)
    assert max(heights(trace)) > 4 and cp.verify(trace, of, progress=False).is_equal


def test_prompts_of_both_kinds_keep_what_is_promised() -> None:
    """Plain requests, arrivals, limits, equal prompts, and preempted requests, whose prompts are read again alone."""
    of, rng = model(torch.bfloat16), random.Random(3)
    for number in range(2):
        prompts = texts([rng.randrange(1, 90) for _ in range(12)])
        prompts[5] = prompts[4]
        requests: list[Any] = [
            Request(prompt, HOT, is_deterministic=i % 3 > 0, arrival_step=rng.choice([0, 0, 4]))
            for i, prompt in enumerate(prompts)
        ]
        settings = {
            **RUN,
            "max_new_tokens": 8,
            "max_batch": rng.choice([6, 12]),
            "max_kv_tokens": (None, 150)[number % 2],
        }
        trace = cp.run(of, requests, **settings)
        assert max(heights(trace)) > 1 and cp.verify(trace, of, progress=False).is_equal
        assert bool(trace.meta["preemptions"]) == bool(number % 2)


# -- which prompts share a pass


def test_long_prompts_have_a_pass_of_their_own_if_pads_would_cost_more() -> None:
    of = model()
    trace = cp.run(of, texts([49, 57, 70, 57, 105, 57, 65, 61]), deterministic=True, **RUN)
    assert heights(trace) == [1, 7]
    trace = cp.run(of, texts([100] * 24), deterministic=True, **RUN)
    assert heights(trace) == [10, 10, 4], "a pass has at most 1,024 token slots"


def test_no_pad_leaves_the_capacity() -> None:
    """A request that goes on from a snapshot begins where a longer prompt's pads would end beyond the cache."""
    of, settings = model(), {**RUN, "capacity": 64}
    prompts = texts([44, 40, 40, 40])
    cached = cp.kv_snapshot(of, prompts[0][:-3], capacity=64)
    requests: list[Any] = [Request(prompts[0], HOT, cached=cached, own_fingerprint=True), *prompts[1:]]
    trace = cp.run(of, requests, deterministic=True, **settings)
    assert not trace.meta["errors"] and heights(trace) == [3, 1]
    assert cp.verify(trace, of, progress=False).is_equal


def test_prompts_are_read_alone_where_that_is_asked_or_needed() -> None:
    of, prompts = model(), texts([9] * 5)
    alone = dict(prefill_group=1), dict(pad_prefill=True)
    for settings in alone:
        assert heights(cp.run(of, prompts, deterministic=True, **RUN, **settings)) == [1] * 5
    assert heights(cp.run(of, prompts[:3], deterministic=True, **RUN)) == [1] * 3, "a trial would cost more"
    zero = cp.interventions.add(torch.ones(of.d_model), site="S", layer=1, request_id=0, own_fingerprint=True)
    assert heights(cp.run(of, prompts, deterministic=True, interventions=zero, **RUN)) == [1] * 5
    assert heights(cp.run(of, prompts, deterministic=True, **RUN)) == [5]
    config = EngineConfig(pad_prefill=False)
    live = hf_model("llama", torch.float32)
    by_torch = choose_path(cp.load_model(live, products="torch"), "plain")[0]
    assert not batches_prompts(by_torch, config, Hooked(), 5)
    assert not batches_prompts(cp.load_model(live).bridged(), config, Hooked(), 5), "the bridge attends in one call"
    other = type(live)(type(live.config)(**{**live.config.to_dict(), "hidden_act": "gelu"})).eval()
    assert not batches_prompts(choose_path(on_loops(cp.load_model(other)), "plain")[0], config, Hooked(), 5)


def test_an_estimate_counts_the_shared_passes() -> None:
    of, prompts = model(), texts(LENGTHS)
    settings = {name: value for name, value in RUN.items() if name != "progress"}
    estimate = cp.estimate(of, prompts, deterministic=True, **settings)
    trace = cp.run(of, prompts, deterministic=True, **RUN)
    assert estimate.prefill_passes.likely == len(heights(trace))


# -- what keeps the promise


@pytest.fixture
def planted() -> tuple[PlainLM, dict[str, bool]]:
    """A model, and the switch of a fault in passes of several prompts."""
    return (of := model()), plant(of, 2)


def test_a_trial_finds_bits_that_depend_on_other_prompts(planted: Any) -> None:
    of, switch = planted
    switch["on"] = True
    assert heights(cp.run(of, texts([9] * 5), deterministic=True, **RUN)) == [1] * 5


def test_after_a_fault_prompts_are_read_alone_in_this_run_and_later(planted: Any) -> None:
    """Nothing of the pass with the fault was committed, so no request has to end."""
    of, switch = planted
    prompts = texts([120, 30, 29, 28, 27])
    exact = want(of, prompts)
    cp.run(of, prompts, deterministic=True, **RUN)
    switch["on"] = True
    for number in range(2):
        trace = cp.run(of, prompts, deterministic=True, **RUN)
        assert [outcome(trace, i) for i in range(5)] == exact and not trace.meta["errors"]
        assert heights(trace) == [1] * 5
        assert len(trace.meta["self_checks"]["differences"]) == 1 - number


def test_a_fault_after_a_request_has_ended_ends_no_run(planted: Any) -> None:
    """The longest prompt's request ends with its first token, before the pass with the fault."""
    of, switch = planted
    prompts, settings = texts([120, *[30] * 8]), {**RUN, "max_new_tokens": 1}
    exact = want(of, prompts, max_new_tokens=1)
    cp.run(of, prompts, deterministic=True, **settings)
    switch["on"] = True
    trace = cp.run(of, prompts, deterministic=True, **settings)
    assert [outcome(trace, i) for i in range(9)] == exact and trace.meta["self_checks"]["differences"]


def test_a_later_fault_ends_deterministic_requests_whose_prompts_were_read_with_others(
    planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, switch = planted
    requests: list[Any] = [
        Request(prompt, HOT, is_deterministic=i > 0, arrival_step=2 * (i // 4))
        for i, prompt in enumerate(texts([9] * 12))
    ]
    settings = {**RUN, "max_new_tokens": 24}
    exact = cp.reference(of, requests, **settings)
    cp.run(of, requests, **settings)
    chosen = iter((None, None, 2))
    monkeypatch.setattr(RecomputeChecker, "_next_prompt", lambda *asked: next(chosen))
    switch["on"] = True
    with pytest.warns(RuntimeWarning, match="set prefill_group=1"):
        trace = cp.run(of, requests, **settings)
    ended = {name for name, error in trace.meta["errors"].items() if "whose prompts were read with others" in error}
    assert ended == {*map(str, range(1, 8))} == {*trace.meta["errors"]}
    assert "a pass with other requests or none differ in the keys" in trace.meta["errors"]["1"]
    for i in range(8, 12):
        assert outcome(trace, i) == outcome(exact, i)
    assert len(trace.committed(0)) == 24


def test_a_prompt_in_doubt_is_neither_copied_nor_rebuilt(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Request 4 copies the prompt of 1, which was read with others; a later pass has the fault. Another request is
    preempted before."""
    of, switch = planted
    first, later = texts([9] * 4), texts([12] * 6)[2:]
    prompts = [*first, first[1], *later, first[1]]
    arrivals = [0, 0, 0, 0, 1, 8, 8, 8, 8, 16]
    requests: list[Any] = [
        Request(prompt, HOT, is_deterministic=i > 0, arrival_step=arrival)
        for i, (prompt, arrival) in enumerate(zip(prompts, arrivals, strict=True))
    ]
    settings = {**RUN, "max_new_tokens": 30, "max_kv_tokens": 130}
    exact = cp.reference(of, requests, **{**RUN, "max_new_tokens": 30})
    cp.run(of, requests, **settings)
    chosen = iter((None, 1))
    monkeypatch.setattr(RecomputeChecker, "_next_prompt", lambda *asked: next(chosen, None))
    switch["on"] = True
    with pytest.warns(RuntimeWarning, match="set prefill_group=1"):
        trace = cp.run(of, requests, **settings)
    assert trace.meta["preemptions"], trace.meta
    assert {*trace.meta["errors"]} == {"1", "2", "3", "4"}
    for i in range(5, 10):
        assert outcome(trace, i) == outcome(exact, i)


def test_a_prompt_is_checked_with_the_attention_of_a_pass_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second chunk has few tokens, which cross a step of spans, in a pass of longer ones."""
    of, seen = model(torch.bfloat16), []
    own = Pass.attention

    def note(*given: Any, **named: Any) -> Any:
        made = own(*given, **named)
        seen.append([[piece.span for piece in pieces] for pieces in made.spans.pieces])
        return made

    prompts = texts([140, 66, 66, 66, 66])
    cp.run(of, prompts, deterministic=True, prefill_chunk=100, **RUN)
    monkeypatch.setattr(Pass, "attention", note)
    monkeypatch.setattr(RecomputeChecker, "_next_prompt", lambda *asked: 0)
    trace = cp.run(of, prompts, deterministic=True, prefill_chunk=100, **RUN)
    assert seen[:3] == [[[128]], [[128, 192], *[[128]] * 4], [[128, 192]]] and heights(trace) == [1, 5]
    assert cp.verify(trace, of, progress=False).is_equal


def test_one_of_32_shared_passes_is_checked_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    of, seen = model(), Counter[str]()
    own = RecomputeChecker._compute_again

    def count(checker: Any, a_pass: Pass, *rest: Any) -> Any:
        seen[a_pass.phase] += 1
        return own(checker, a_pass, *rest)

    monkeypatch.setattr(RecomputeChecker, "_compute_again", count)
    settings = {**RUN, "max_new_tokens": 1, "max_batch": 4, "capture": None}
    trace = cp.run(of, texts([6] * 132), deterministic=True, **settings)
    assert heights(trace) == [4] * 33 and seen == {"prefill": 2}
    assert trace.meta["self_checks"] == {"compared": 2, "differences": []}


def test_the_trial_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of, tried = model(), []
    own = shapes.ShapeTrial.run_at
    monkeypatch.setattr(shapes.ShapeTrial, "run_at", lambda cycle, *at: tried.append(at) or own(cycle, *at))
    for _ in range(2):
        cp.run(of, texts([9] * 5), deterministic=True, **RUN)
    assert tried == [(4, 68)]
