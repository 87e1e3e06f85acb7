"""A soak finds no difference, sees every planted one, and has a negative control that diverges."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import ForwardRecord
from cacheprobe.engine import choosing, consistency
from cacheprobe.trace.recording.recorder import Recorder
from tests.stress import soak as module
from tests.stress import subjects
from tests.stress.soak import Tally, Traffic, kind_of_rollback, negative_control, one_episode, soak, stress
from tests.stress.subjects import Subject, near_tie_subjects, real_subjects, tiny_subjects
from tests.stress.traffic import Corrupted, Episode, draw_episode, draw_request

pytestmark = pytest.mark.determinism

LLAMAS = [subject for subject in tiny_subjects() if subject.family == "llama"]
"""In three dtypes."""
LLAMA = LLAMAS[0]
NEAR_TIE = near_tie_subjects()[0]
EPISODES = 24
"""So many that every kind of traffic occurs."""


@pytest.fixture(scope="module")
def tally() -> Tally:
    found = Tally()
    for episode in range(EPISODES):
        one_episode(LLAMAS[episode % 3], found, [6, episode], most_requests=4)
    return found


def test_random_traffic_equals_the_reference(tally: Tally) -> None:
    """Heads, preemptions, interventions, streams and cancellations, in the same episodes too."""
    kinds = ["states_and_heads_compared", "readings_compared", "third_party_tokens", "rollbacks_injected"]
    kinds += [f"episodes_with_{site}" for site in ("q", "k", "v", "z", "pattern", "all_together")]
    kinds += ["interventions", "streams", "streams_abandoned", "requests_cancelled", "preemptions"]
    kinds += [f"episodes_drafter_{name}" for name in ("none", "fast_path", "early_exit", "ngram", "draft_model")]
    assert not tally.differences and [kind for kind in kinds if not tally.counts[kind]] == []
    assert tally.counts["requests_deterministic"] > EPISODES and tally.counts["states_and_heads_compared"] > 1000
    assert set(kinds) < set(tally.figures()) and len(tally.compared) == 3


def test_fast_path_and_verifier_disagree_by_themselves() -> None:
    """And what is committed is the reference's."""
    found = Tally()
    for episode in range(4):
        one_episode(NEAR_TIE, found, [3, episode])
    assert found.counts["rollbacks_natural"] > 0 and not found.differences


@pytest.mark.slow
def test_a_long_soak_of_every_subject() -> None:
    figures = stress(20_000, seed=1, has_real=True, report=lambda tally: None)
    assert figures["has_passed"], figures["first_differences"]
    assert figures["rollbacks_natural"] > 0 and figures["real_model_compared_tokens"] > 0


def test_every_kind_of_subject_gets_its_share() -> None:
    found = soak({"tiny": LLAMAS, "near_ties": [NEAR_TIE]}, 120, 0, lambda tally: None)
    assert found.compared.total() >= 120 and found.compared[NEAR_TIE.name] and len(found.compared) > 1


def another_token(trace: cp.Trace) -> None:
    """Changes the last token of request 0."""
    said = trace.tokens[0]
    trace.tokens[0] = [*said[:-1], (said[-1] + 1) % LLAMA.model.d_vocab]


def another_logprob(trace: cp.Trace) -> None:
    """Changes the last bit of every token's log-probability."""
    nats = trace.event_table.committed_logprobs_nats.tolist()
    told = [tuple(float(np.nextafter(one, -np.inf)) for one in step) for step in nats]
    trace.event_table = trace.event_table.assign(committed_logprobs_nats=told)


def another_state(site: str) -> Callable[[cp.Trace], None]:
    """Returns a function that changes one bit of the first number of every vector of a site, in one layer."""

    def change(trace: cp.Trace) -> None:
        states = trace.store.all_of(site, 1).clone()
        states.view(torch.int32).reshape(-1)[:: states.shape[-1] if states.ndim > 1 else 1] ^= 1
        trace.store._states[site, 1] = states

    return change


def another_reading(column: str) -> Callable[[cp.Trace], None]:
    """Returns a function that changes one column of the readings of layer 0 by the least amount."""

    def change(trace: cp.Trace) -> None:
        table = trace.hypothesis_table.copy()
        held, of_layer = table[column].to_numpy(copy=True), (table.layer == 0).to_numpy()
        is_float = held.dtype.kind == "f"
        held[of_layer] = np.nextafter(held[of_layer], held.dtype.type(-np.inf)) if is_float else held[of_layer] + 1
        trace.hypothesis_table = table.assign(**{column: held})

    return change


READINGS = ("token_id", "logprob_nats", "entropy_nats", "rank", "committed_logprob_nats")
PLANTED: dict[str, Callable[[cp.Trace], None]] = {
    "token": another_token,
    "log-prob": another_logprob,
    **{f"site {site}": another_state(site) for site in "STCz"},
    **{column: another_reading(column) for column in READINGS},
}


def full_episode(subject: Subject, seed: list[int], most_requests: int) -> Episode:
    """Returns an episode without interventions and cancellations that records everything."""
    capture = cp.CaptureConfig(sites="STCZ", heads=("z",))
    drawn = draw_episode(subject, seed, most_requests)
    return replace(
        drawn, is_stream=False, cancelled={}, interventions=(), settings={**drawn.settings, "capture": capture}
    )


@pytest.mark.parametrize("kind", ["nothing", *PLANTED])
def test_a_planted_difference_is_reported(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cp.run

    def run(*args: Any, **settings: Any) -> cp.Trace:
        trace = right(*args, **settings)
        if kind in PLANTED:
            PLANTED[kind](trace)
        return trace

    monkeypatch.setattr(module, "draw_episode", full_episode)
    monkeypatch.setattr(cp, "run", run)
    found = Tally()
    one_episode(LLAMA, found, [7, 0], most_requests=2)
    assert len(found.differences) == (kind != "nothing"), found.differences
    assert kind in READINGS or kind == "nothing" or kind in found.differences[0]


def accept_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    right = choosing.num_accepted
    monkeypatch.setattr(choosing, "num_accepted", lambda d, t: min(right(d, t) + 1, len(d)))


def keep_stale_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder's last block of heads stays open after its pass."""
    right = Recorder.after_forward

    def stale(recorder: Recorder, record: ForwardRecord) -> None:
        now = recorder._now
        right(recorder, record)
        assert now is not None
        recorder._now = replace(now, states={}, lens_block=None, watched=None)

    monkeypatch.setattr(Recorder, "after_forward", stale)


def turn_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's copy of the model has its vocabulary turned round."""
    right = Subject.build

    def build(subject: Subject) -> Any:
        live: Any = right(subject)
        with torch.no_grad():
            head = live.get_output_embeddings()
            head.weight.copy_(head.weight.flip(0))
        return live

    monkeypatch.setattr(Subject, "build", build)


@pytest.mark.parametrize(
    ("plant", "said"), [(accept_too_many, "token"), (keep_stale_heads, "site"), (turn_vocabulary, "Hugging Face says")]
)
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = Tally()
    for episode in range(6):
        one_episode(LLAMA, found, [6, episode], most_requests=4)
    assert any(said in difference for difference in found.differences), found.differences


def test_what_counts_as_natural() -> None:
    """Only the fast path's own candidate, and only where a verdict is no matter of chance."""
    fast = cp.drafters.FastPath()
    replaced = Corrupted(fast, 0.5, np.random.default_rng(0), {(0, 7)})
    request = cp.Request([1], request_id=0, is_deterministic=True)
    free = cp.Request([1], request_id=0)
    drawn = replace(draw_episode(LLAMA, [0], 2), settings={"acceptance": "equality"})
    by_chance = replace(drawn, settings={"acceptance": "rejection"})

    def kind(of: Episode, drafter: Any, request: cp.Request) -> str:
        return kind_of_rollback(replace(of, drafter=drafter), request, 7)

    assert kind(drawn, replaced, request) == kind(drawn, replaced, free) == "injected"
    assert kind(drawn, None, request) == kind(drawn, fast, free) == kind(by_chance, fast, request) == "natural"
    assert kind(drawn, cp.drafters.NGram(), request) == kind(by_chance, fast, free) == "other"
    replaced.altered.clear()
    assert kind(drawn, replaced, request) == "natural"


def test_traffic_draws_every_kind() -> None:
    requests = [draw_request(LLAMA, number).sampling for number in range(60)]
    for name, plain in (("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1)):
        assert {getattr(sampling, name) == plain for sampling in requests} == {True, False}, name
    assert len({(s.window, s.group, s.prefill_group) for s in tiny_subjects()}) == 6
    shapes = {(s.window, s.group) for s in real_subjects()}
    assert {(16, 4), (1, 16)} < shapes and any(s.prefill_group > 1 for s in real_subjects())


DIVERGES = Traffic(NEAR_TIE, num_prompts=6, new_tokens=12, batches=(6, 1))
ALIKE = Traffic(NEAR_TIE, num_prompts=2, new_tokens=4, batches=(1, 1))
"""The same batch size twice: nothing can differ."""


def test_the_control_goes_on_until_one_kind_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = negative_control([ALIKE, DIVERGES, ALIKE])
    assert figures["control_traffic"] == NEAR_TIE.key and figures["control_sequences"] == 6
    assert figures["control_unverified_differ"] > 0 == figures["control_verified_differ"]
    assert negative_control([ALIKE])["control_unverified_differ"] == 0
    monkeypatch.setattr(Traffic, "run", lambda traffic, shape, is_verified: (0, 2) if is_verified else (3, 0))
    assert negative_control([DIVERGES])["control_verified_differ"] == 2  # log-probabilities alone
    kinds = list(module.traffic_to_try(has_real=True))
    assert kinds[0].subject.is_real and kinds[0].subject.dtype == "bfloat16"
    assert any(kind.subject.dtype == "float32" and not kind.subject.is_real for kind in kinds)


@pytest.mark.parametrize(
    ("unverified", "verified", "differences", "has_passed"),
    [(3, 0, 0, True), (0, 0, 0, False), (3, 1, 0, False), (3, 0, 1, False)],
)
def test_a_stress_test_is_void_without_divergence(
    unverified: int, verified: int, differences: int, has_passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = {"control_unverified_differ": unverified, "control_verified_differ": verified}
    monkeypatch.setattr(module, "negative_control", lambda to_try: control)
    found = Tally(Counter({"llama float32": 10}), differences=["planted"] * differences)
    monkeypatch.setattr(module, "soak", lambda *given: found)
    assert stress(10, 0, has_real=False, report=lambda tally: None)["has_passed"] is has_passed


def refuse(monkeypatch: pytest.MonkeyPatch, is_refused: Callable[[tuple[int, int]], bool]) -> None:
    """The trial refuses verify passes of these (group, window), and judges all others as it does."""
    right = consistency._fault

    def fault(*shape: Any) -> str | None:
        _, batch, width, _, phase, _ = shape
        return "row 0 slot 2 gives other T" if phase == "verify" and is_refused((batch, width)) else right(*shape)

    monkeypatch.setattr(consistency, "_fault", fault)


def test_a_refused_shape_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under MKL_CBWR=COMPATIBLE, for example, the trial refuses some shapes in float32."""
    refuse(monkeypatch, lambda shape: shape == (LLAMA.group, LLAMA.window))
    found = Tally()
    one_episode(LLAMA, found, [5, 1], most_requests=3)
    assert "row 0 slot 2 gives other T" in found.refused[LLAMA.key] and not found.differences and found.compared
    refuse(monkeypatch, lambda shape: True)
    with pytest.raises(RuntimeError, match=r"20 shapes of .* were refused.*OMP_NUM_THREADS"):
        one_episode(LLAMA, found, [5, 1], most_requests=3)
    assert subjects.MOST_REFUSED == 20
