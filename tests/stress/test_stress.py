"""A soak finds no difference, sees every planted one, and has a negative control that diverges."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cacheprobe as cp
from cacheprobe.core.records import ForwardRecord
from cacheprobe.engine import committer, shapes
from cacheprobe.trace.recording.recorder import Recorder
from tests.stress import soak
from tests.stress.soak import Tally, control_subjects, differing, negative_control, one_episode, stress
from tests.stress.subjects import Subject, near_tie_subjects, real_subjects, tiny_subjects
from tests.stress.traffic import Episode, draw_episode, draw_request

pytestmark = pytest.mark.determinism

LLAMAS = [subject for subject in tiny_subjects() if subject.family == "llama"]
"""In three dtypes."""
LLAMA = LLAMAS[0]
NEAR_TIE = near_tie_subjects()[0]
EPISODES = 20
"""So many that every kind of traffic occurs."""


def test_random_traffic_equals_the_reference() -> None:
    """All drafters, heads, preemptions, interventions, streams and cancellations, in the same episodes too."""
    tally = Tally()
    for episode in range(EPISODES):
        one_episode(LLAMAS[episode % 3], tally, [8, episode], most_requests=4)
    names = ("q", "k", "v", "z", "pattern", "all together")
    names += tuple(f"drafter {name}" for name in ("none", "fast_path", "early_exit", "ngram", "draft_model"))
    kinds = ["states_and_heads_compared", "readings_compared", "rollbacks_injected", "rollbacks_other", "interventions"]
    kinds += ["streams", "requests_cancelled", "preemptions", *(f"episodes with {name}" for name in names)]
    assert not tally.differences and [kind for kind in kinds if not tally.counts[kind]] == []
    assert tally.counts["requests_deterministic"] > EPISODES and tally.counts["states_and_heads_compared"] > 1000


def test_fast_path_and_verifier_disagree_by_themselves() -> None:
    """And what is committed is the reference's."""
    tally = Tally()
    for episode in range(4):
        one_episode(NEAR_TIE, tally, [3, episode], most_requests=4)
    assert tally.counts["rollbacks_natural"] > 0 and not tally.differences


@pytest.mark.slow
def test_a_long_soak_of_every_subject() -> None:
    figures = stress(20_000, seed=1, has_real=True)
    assert figures["has_passed"], figures["first_differences"]
    assert figures["rollbacks_natural"] > 0 and figures["real_model_compared_tokens"] > 0


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
        states.view(torch.int32).reshape(-1)[:: states.shape[-1]] ^= 1
        trace.store._states[site, 1] = states

    return change


def another_reading(column: str) -> Callable[[cp.Trace], None]:
    """Returns a function that changes one column of the readings of layer 0 by the least amount."""

    def change(trace: cp.Trace) -> None:
        table: Any = trace.hypothesis_table
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


@pytest.mark.parametrize("kind", ["nothing", *PLANTED])
def test_a_planted_difference_is_reported(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cp.run

    def run(*args: Any, **settings: Any) -> cp.Trace:
        trace = right(*args, **settings)
        if kind in PLANTED:
            PLANTED[kind](trace)
        return trace

    def full_episode(subject: Subject, seed: list[int], most_requests: int) -> Episode:
        """Returns an episode without interventions and cancellations that records everything."""
        drawn = draw_episode(subject, seed, most_requests)
        capture = cp.CaptureConfig(sites="STCZ", heads=("z",))
        return replace(drawn, is_stream=False, settings={**drawn.settings, "interventions": [], "capture": capture})

    monkeypatch.setattr(soak, "draw_episode", full_episode)
    monkeypatch.setattr(cp, "run", run)
    tally = Tally()
    one_episode(LLAMA, tally, [7, 0], most_requests=2)
    assert len(tally.differences) == (kind != "nothing"), tally.differences
    said = {"token": "committed"}.get(kind, kind)
    assert kind in READINGS or kind == "nothing" or said in tally.differences[0]


def accept_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    right = committer.num_accepted
    monkeypatch.setattr(committer, "num_accepted", lambda d, t: min(right(d, t) + 1, len(d)))


def keep_stale_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder's last block of heads stays open after its pass."""
    right = Recorder.after_forward

    def stale(recorder: Recorder, record: ForwardRecord) -> None:
        now = recorder._now
        right(recorder, record)
        assert now is not None
        now.layer_index, now.lens_block, now.watched = {}, None, None
        recorder._now = now

    monkeypatch.setattr(Recorder, "after_forward", stale)


@pytest.mark.parametrize(("plant", "said"), [(accept_too_many, "token"), (keep_stale_heads, "site")])
def test_a_planted_fault_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    tally = Tally()
    for episode in range(8):
        one_episode(LLAMA, tally, [6, episode], most_requests=4)
    assert any(said in difference for difference in tally.differences), tally.differences


def test_traffic_draws_every_kind() -> None:
    requests = [draw_request(LLAMA, number).sampling for number in range(60)]
    for name, plain in (("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1)):
        assert {getattr(sampling, name) == plain for sampling in requests} == {True, False}, name
    assert len({(s.window, s.group, s.prefill_group) for s in tiny_subjects()}) == 6
    shapes = {(s.window, s.group) for s in real_subjects()}
    assert {(16, 4), (1, 16)} < shapes and any(s.prefill_group > 1 for s in real_subjects())


def test_the_control_goes_on_until_one_subject_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = negative_control([NEAR_TIE], batches=(6, 1), num_prompts=6)
    assert figures["control_traffic"] == NEAR_TIE.key and figures["control_sequences"] == 6
    assert figures["control_unverified_differ"] > 0 == figures["control_verified_differ"]
    assert differing(NEAR_TIE, False, batches=(1, 1), num_prompts=2) == (0, 0)  # the same batch size twice
    kinds = control_subjects(has_real=True)
    assert kinds[0].is_real and kinds[0].dtype == "bfloat16"
    assert any(kind.dtype == "float32" and not kind.is_real for kind in kinds)
    monkeypatch.setattr(soak, "differing", lambda subject, is_verified, *more: (0, 2) if is_verified else (3, 0))
    assert negative_control([NEAR_TIE], (1,), 1)["control_verified_differ"] == 2  # log-probabilities alone
    monkeypatch.setattr(soak, "differing", lambda subject, *more: (int(subject is LLAMA), 0))
    assert negative_control([NEAR_TIE, LLAMA, NEAR_TIE], (1,), 1)["control_traffic"] == LLAMA.key
    assert negative_control([NEAR_TIE], (1,), 1)["control_unverified_differ"] == 0


@pytest.mark.parametrize(
    ("unverified", "verified", "differences", "has_passed"),
    [(3, 0, 0, True), (0, 0, 0, False), (3, 1, 0, False), (3, 0, 1, False)],
)
def test_a_stress_test_is_void_without_divergence(
    unverified: int, verified: int, differences: int, has_passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def episode(subject: Subject, tally: Tally, seed: list[int], most_requests: int) -> None:
        tally.compared[subject.name] += 4
        tally.differences = ["planted"] * differences

    control = {"control_unverified_differ": unverified, "control_verified_differ": verified}
    monkeypatch.setattr(soak, "negative_control", lambda *given, **settings: control)
    monkeypatch.setattr(soak, "one_episode", episode)
    figures = stress(10, 0, has_real=False)
    assert figures["has_passed"] is has_passed and figures["compared_tokens"] == 12


def test_a_refused_shape_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under MKL_CBWR=COMPATIBLE, for example, the trial refuses some shapes in float32."""
    right, refused = shapes._fault, {(LLAMA.group, LLAMA.window)}

    def fault(*shape: Any) -> str | None:
        _, batch, width, _, phase, _ = shape
        return "row 0 slot 2 gives other T" if phase == "verify" and (batch, width) in refused else right(*shape)

    monkeypatch.setattr(shapes, "_fault", fault)
    tally = Tally()
    one_episode(LLAMA, tally, [5, 1], most_requests=3)
    assert "row 0 slot 2 gives other T" in tally.refused[LLAMA.key] and not tally.differences and tally.compared
    refused.update((group, window) for group in range(30) for window in range(30))
    with pytest.raises(RuntimeError, match=r"20 shapes of .* were refused.*OMP_NUM_THREADS"):
        one_episode(LLAMA, tally, [5, 1], most_requests=3)
