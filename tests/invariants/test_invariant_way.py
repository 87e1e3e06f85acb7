"""determinism="invariant": passes of any number of requests decide, without a verifier, and keep what is promised."""

import random
from typing import Any

import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Request, SamplingParams, fingerprint_differences
from cacheprobe.engine.checker import AGAIN_EVERY
from cacheprobe.engine.shapes import Hooked, ShapeRefused, invariant_widths
from cacheprobe.models.paths import choose_path
from cacheprobe.models.plain.lm import PlainLM
from tests.invariants.machines import WithFault, plant, rounding_by_shape
from tests.invariants.machines import in_loops as model
from tests.invariants.runs import HOT, NEW, PROMPTS, RUN, outcome, random_batch
from tests.tiny import hf_model

pytestmark = pytest.mark.determinism

INVARIANT: dict[str, Any] = {**RUN, "determinism": "invariant"}


def alone(of: Any, requests: list[Any], **settings: Any) -> list[Any]:
    trace = cp.reference(of, requests, **{**INVARIANT, "sampling": HOT, **settings})
    return [outcome(trace, i) for i in range(len(requests))]


# -- D1 and D2


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_request_has_the_same_bits_beside_any_others(family: str) -> None:
    """Other requests of both kinds, arrivals, limits, preemption, no drafter, a random one or early exits."""
    of, rng, seen = model(torch.bfloat16, family), random.Random(5), set()
    needle = Request(PROMPTS[0], HOT, is_deterministic=True, arrival_step=3)
    (want,) = alone(of, [needle])
    for _ in range(7):
        requests, place, settings = random_batch(rng, needle)
        trace = cp.run(of, requests, **{**INVARIANT, **settings})
        assert outcome(trace, place) == want, (place, settings)
        mine = trace.events().query(f"request_id == {place}")
        seen |= {"preempted"} if place in dict(trace.meta["preemptions"]) else set()
        seen |= {"rolled back"} if mine.num_rolled_back.sum() else set()
        seen |= {f"{int(height)} high" for height in mine.query("phase != 'prefill'").batch_rows}
    assert seen >= {"preempted", "rolled back", "1 high", "2 high", "3 high", "4 high"}


def test_any_number_of_requests_gives_the_bits_of_the_reference() -> None:
    """Heights 1 to 23, as requests end at different times, in passes of one token a request and no dummy."""
    of, rng = model(torch.bfloat16), random.Random(1)
    requests: list[Any] = [
        Request([rng.randrange(60) for _ in range(1 + i % 7)], SamplingParams(max_new_tokens=2 + i, seed=i))
        for i in range(23)
    ]
    settings = dict(determinism="invariant", capacity=64, progress=False)
    trace = cp.run(of, requests, deterministic=True, **settings)
    want = cp.reference(of, requests, **settings)
    assert [outcome(trace, i) for i in range(23)] == [outcome(want, i) for i in range(23)]
    decode = trace.events().query("phase == 'decode'")
    assert set(decode.batch_slots) == {1} and set(decode.batch_rows) == {*range(1, 24)}
    assert decode.groupby("step").batch_rows.first().tolist() == decode.groupby("step").size().tolist()


def test_without_a_drafter_it_is_a_plain_request(tmp_path: Any) -> None:
    """Committed at once: rows, ledger and events say so, `cp.verify` and the stored run agree."""
    of = model()
    trace = cp.run(of, PROMPTS, **INVARIANT, sampling=HOT, deterministic=[0, 2])
    assert set(trace.events().phase) == {"prefill", "decode"}
    assert set(trace.row_table.status) == {"committed"} and not trace.num_drafted
    for i in range(5):
        assert set(trace.ledger(i).provenance) == {"prefill", "decoded"}
    assert trace.meta["self_checks"] == {"compared": 1, "differences": []} and "against itself 1 times" in repr(trace)
    for one in (trace, cp.load_trace(trace.save(tmp_path / "run"))):
        result = cp.verify(one, of, progress=False)
        assert result.is_equal and result.num_requests == 2
        assert result.num_states == sum(3 * 3 * (len(PROMPTS[i]) + NEW - 1) for i in (0, 2))
    assert cp.verify(cp.reference(of, PROMPTS[:2], **INVARIANT), of, progress=False).is_equal


@pytest.mark.parametrize("drafter", [cp.drafters.NGram(), cp.drafters.EarlyExit(layer=0)])
def test_drafts_are_verified_without_dummies(drafter: Any) -> None:
    """A pass has the requests at hand, and is as wide as the longest draft and one more."""
    of = model()
    settings: dict[str, Any] = {**INVARIANT, "window": 8, "drafter": drafter, "sampling": HOT, "max_new_tokens": 24}
    trace = cp.run(of, PROMPTS, deterministic=True, **settings)
    assert [outcome(trace, i) for i in range(5)] == alone(of, PROMPTS, **settings)
    assert cp.verify(trace, of, progress=False).is_equal
    verify = trace.events().query("phase == 'verify'")
    for _, of_pass in verify.groupby("step"):
        assert set(of_pass.batch_rows) == {len(of_pass)}
        fed = max(len(ids) for ids in of_pass.target_token_ids)
        assert set(of_pass.batch_slots) == {fed}
    assert trace.num_rolled_back > 0
    assert len(set(verify.batch_rows)) > 1


def test_the_window_decides_the_bits_and_the_drafter_does_not() -> None:
    """Runs of one fingerprint, with and without a drafter, on a model whose passes of one token have other bits. So
    decode passes have a pad."""
    of, runs = WithFault(model(), None, 1), []
    for drafter in (None, cp.drafters.NGram(), cp.drafters.EarlyExit(layer=1)):
        runs.append(cp.run(of, PROMPTS, deterministic=True, **INVARIANT, sampling=HOT, drafter=drafter))
        assert not fingerprint_differences(runs[-1].fingerprint, runs[0].fingerprint)
        assert [outcome(runs[-1], i) for i in range(5)] == [outcome(runs[0], i) for i in range(5)]
    assert set(runs[0].events().query("phase == 'decode'").batch_slots) == {2}
    assert runs[0].logprobs(0) == alone(of, PROMPTS[:1])[0].logprobs


# -- what else a request may do


def test_stops_samples_shared_prompts_and_cancelled_requests() -> None:
    of = model()
    text = cp.reference(of, PROMPTS[:1], **INVARIANT, sampling=HOT, capture=None).committed(0)
    stop = SamplingParams(temperature=0.9, seed=7, stop_token_ids=(text[6],))
    requests = [
        Request(PROMPTS[0], stop), Request(PROMPTS[0], HOT), Request(PROMPTS[2], SamplingParams(temperature=1.0, n=3)),
        Request(PROMPTS[0], HOT, is_deterministic=True),
    ]  # fmt: skip
    trace = cp.run(of, requests, **INVARIANT, deterministic=[0, 2])
    assert trace.meta["finish"]["0"] == "stop" and trace.committed(0) == text[:7]
    assert cp.verify(trace, of, progress=False).is_equal
    shared = trace.events().query("phase == 'prefill' and batch_rows == 0")
    assert set(shared.request_id) == {3, 4, 5}, "samples and equal prompts of one kind are read once"
    stream = cp.stream(of, PROMPTS, **{k: v for k, v in INVARIANT.items() if k != "progress"}, deterministic=True)
    for piece in stream:
        if piece.request_id == 1:
            stream.cancel(1)
    assert stream.trace().meta["finish"]["1"] == "cancelled"
    assert cp.verify(stream.trace(), of, progress=False).is_equal


@pytest.mark.parametrize("drafter", [None, cp.drafters.NGram()])
def test_interventions_act_in_the_passes_that_decide(drafter: Any) -> None:
    of, phase = model(), "decode" if drafter is None else "verify"
    where = dict(site="S", layer=1, phases=phase, own_fingerprint=True)
    zero = [cp.interventions.add(torch.ones(of.d_model), request_id=i, **where) for i in (0, 3)]
    settings = {**INVARIANT, "sampling": HOT, "drafter": drafter}
    plain = cp.run(of, PROMPTS, deterministic=True, **settings)
    trace = cp.run(of, PROMPTS, deterministic=True, interventions=zero, **settings)
    assert trace.digest(0) != plain.digest(0) and trace.digest(1) == plain.digest(1)
    assert cp.verify(trace, of, progress=False).is_equal
    want = cp.reference(of, PROMPTS, interventions=zero, **settings)
    assert [outcome(trace, i) for i in range(5)] == [outcome(want, i) for i in range(5)]


def test_the_fingerprint_tells_the_two_ways_apart() -> None:
    of = model()
    prints = {
        way: cp.run(of, PROMPTS[:1], **{**RUN, "determinism": way}, deterministic=True).fingerprint
        for way in ("verify", "invariant")
    }
    assert fingerprint_differences(prints["verify"], prints["invariant"]) == [("determinism", "verify", "invariant")]
    with pytest.raises(ValueError, match="unknown determinism 'both'; choose one of verify, invariant"):
        cp.run(of, PROMPTS[:1], **{**RUN, "determinism": "both"})


# -- what keeps the promise


@pytest.fixture
def planted() -> tuple[PlainLM, dict[str, bool]]:
    """A model, and the switch of its fault."""
    return (of := model()), plant(of, 1)


def test_a_product_whose_bits_depend_on_the_height_is_refused(planted: Any) -> None:
    of, switch = planted
    settings = {**INVARIANT, "window": 1, "deterministic": True}
    switch["on"] = True
    said = (
        r"pass of 2 x 1 tokens differs from one of 1 x 1: row 1 slot 0 gives other keys of layer 0, the keys \(made by "
        r"a norm and a product\), than the same token alone in slot 0; set determinism='verify'"
    )
    for drafter in (None, cp.drafters.NGram()):
        with pytest.raises(ShapeRefused, match=said):
            cp.run(of, PROMPTS, **settings, drafter=drafter)
    with pytest.raises(ShapeRefused, match="a pass of 3 x 1 tokens differs"):  # of the check, beside two dummies
        cp.run(of, PROMPTS[:1], **settings)


def test_a_fault_in_one_height_or_width_alone_is_found() -> None:
    """The odd and even heights around tiles, and the narrow widths, each by itself."""
    config = shape(window=4)
    for height in (2, 5, 9, 15, 18):
        of = WithFault(model(), height, None)
        with pytest.raises(ShapeRefused, match=f"a pass of {height} x 4 tokens differs"):
            invariant_widths(of, config, Hooked(), 18)
        assert invariant_widths(of, config, Hooked(), height - 1) == (1, 2, 3)
    for width in (2, 3):
        of = WithFault(model(), None, width)
        assert invariant_widths(of, config, Hooked(), 3) == (1, 5 - width)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_with_products_of_torch_every_height_is_tried(family: str) -> None:
    """The norms of GPT-2 are always torch's."""
    by_torch = cp.load_model(hf_model("llama"), products="torch")
    of = choose_path(by_torch, "plain")[0] if family == "llama" else model(family=family)
    seen = WithFault(of)
    try:
        assert invariant_widths(seen, shape(window=4), Hooked(), 13) == ()
    except ShapeRefused:  # on most machines
        pass
    assert {height for height, _ in seen.shapes} == {*range(1, 14)}
    with pytest.raises(ShapeRefused, match="determinism='verify'"):
        cp.run(rounding_by_shape(), PROMPTS, **INVARIANT, deterministic=True)


def test_a_fault_after_the_trial_ends_the_deterministic_requests(planted: Any) -> None:
    """The check finds it in its first pass; requests that promised nothing go on."""
    of, switch = planted
    settings = {**INVARIANT, "sampling": HOT}
    plain = cp.run(of, PROMPTS, **settings, deterministic=[1, 2])
    switch["on"] = True
    trace = cp.run(of, PROMPTS, **settings, deterministic=[1, 2])
    assert set(trace.meta["errors"]) == {"1", "2"} and len(trace.meta["self_checks"]["differences"]) == 1
    error = trace.meta["errors"]["1"]
    assert "computed twice, and batch index" in error and "set determinism='verify'" in error
    assert "a pass with other requests or none differ in the keys (made by a norm and a product) of layer 0" in error
    for i in (1, 2):
        assert trace.committed(i) == plain.committed(i)[: len(trace.committed(i))] and len(trace.committed(i)) < NEW
    for i in (0, 3, 4):
        assert len(trace.committed(i)) == NEW


def test_the_check_costs_one_small_pass_in_32() -> None:
    of = model()
    settings: dict[str, Any] = {**INVARIANT, "window": 1, "capacity": 128, "capture": None, "max_new_tokens": 100}
    for num_prompts, height in ((5, 1), (1, 3)):  # a request by itself is computed again behind two dummies
        seen = WithFault(of)
        trace = cp.run(seen, PROMPTS[:num_prompts], **settings, deterministic=True)
        num_passes = len(trace.events().query("phase == 'decode'").step.unique())
        assert num_passes == 99 and trace.meta["self_checks"]["compared"] == -(-(num_passes - 1) // AGAIN_EVERY)
        assert seen.shapes.count((height, 1)) - (num_passes if height == num_prompts else 0) >= 4


def shape(**given: Any) -> EngineConfig:
    return EngineConfig(**{"group": 4, "capacity": 96, "determinism": "invariant", **given})
