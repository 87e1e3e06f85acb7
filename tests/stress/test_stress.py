"""A soak finds no difference, sees every planted one, and has a negative control that diverges."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import cacheprobe as cp
from tests.stress import soak
from tests.stress.soak import Tally, one_episode, stress
from tests.stress.subjects import Subject, near_tie_subjects, tiny_subjects
from tests.stress.traffic import Episode, draw_episode

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
