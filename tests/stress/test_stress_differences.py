"""A stress test reports every kind of difference: each is planted in a run's trace, smaller than any real one."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cacheprobe.core.records import Request
from cacheprobe.stress import mixed, soak, traffic
from cacheprobe.stress import run as stress_run
from cacheprobe.stress.run import run_stress
from cacheprobe.stress.subjects import Subject, tiny_subjects
from cacheprobe.stress.tally import Tally
from cacheprobe.trace.trace import Trace

pytestmark = pytest.mark.determinism

(LLAMA,) = (subject for subject in tiny_subjects() if (subject.name, subject.dtype) == ("llama", "float32"))


def another_token(trace: Trace) -> None:
    """Changes the last token of every deterministic request."""
    for request in trace.requests:
        if request.is_deterministic and (said := trace.tokens[request.request_id]):
            trace.tokens[request.request_id] = [*said[:-1], (said[-1] + 1) % LLAMA.model.d_vocab]


def another_logprob(trace: Trace) -> None:
    """Changes the last bit of every token's log-probability."""
    told = [tuple(float(np.nextafter(nats, -np.inf)) for nats in step) for step in _nats(trace)]
    trace.event_table = trace.event_table.assign(committed_logprobs_nats=told)


def _nats(trace: Trace) -> list[Any]:
    return trace.event_table.committed_logprobs_nats.tolist()


def another_state(site: str) -> Callable[[Trace], None]:
    """Returns a function that changes one bit of the first number of every vector of a site, in one layer."""

    def change(trace: Trace) -> None:
        if site not in (*trace.store.sites, *trace.store.heads):
            return
        states = trace.store.all_of(site, 1).clone()
        states.view(torch.int32).reshape(-1)[:: states.shape[-1] if states.ndim > 1 else 1] ^= 1
        trace.store._states[site, 1] = states

    return change


def another_reading(column: str) -> Callable[[Trace], None]:
    """Returns a function that changes the least in one column of the readings of layer 0."""

    def change(trace: Trace) -> None:
        if trace.hypothesis_table is None:
            return
        table = trace.hypothesis_table.copy()
        of_layer = (table.layer == 0).to_numpy()
        held = table[column].to_numpy(copy=True)
        held[of_layer] = (
            np.nextafter(held[of_layer], held.dtype.type(-np.inf)) if held.dtype.kind == "f" else held[of_layer] + 1
        )
        trace.hypothesis_table = table.assign(**{column: held})

    return change


READINGS = ("token_id", "logprob_nats", "entropy_nats", "rank", "committed_logprob_nats")
SOAKED: dict[str, tuple[Callable[[Trace], None], str]] = {
    "token": (another_token, "tokens"),
    "log-probability": (another_logprob, "log-probabilities differ"),
    **{f"state {site}": (another_state(site), "states or readings differ") for site in "STC"},
    **{f"reading {column}": (another_reading(column), "states or readings differ") for column in READINGS},
}
"""Kinds of difference, and what a report says of each."""
MIXED: dict[str, tuple[Callable[[Trace], None], str]] = {
    "token": (another_token, "tokens"),
    "log-probability": (another_logprob, "log-prob"),
    "state S": (another_state("S"), "site S"),
    "head z": (another_state("z"), "site z"),
    "reading": (another_reading("entropy_nats"), "the reading of layer 0 differs"),
}
"""The same of a mixed episode, whose comparison is `cp.verify`; test_verify_damage.py has the other kinds."""


def greedy_request(subject: Subject, number: int) -> Request:
    """Returns a request of the pool, made greedy, so that Hugging Face is asked too."""
    request = traffic_request(subject, number)
    assert request.sampling is not None
    plain = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    return replace(request, sampling=replace(request.sampling, **plain, max_new_tokens=6))


traffic_request = traffic.draw_request


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes episodes of a few requests, all of them greedy and with states."""
    monkeypatch.setattr(soak, "MOST_REQUESTS", {"tiny": 3})
    monkeypatch.setattr(mixed, "MOST_REQUESTS", {"tiny": 2})
    monkeypatch.setattr(soak, "CAPTURE_SHARE", 1.0)
    monkeypatch.setattr(soak, "STATES_EVERY", 1)
    for module in (soak, traffic):
        monkeypatch.setattr(module, "draw_request", greedy_request)


@pytest.fixture(autouse=True)
def small_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def answered() -> Tally:
    """The oracle's answers to the requests of the episode that every test repeats."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small(monkeypatch)
        tally = Tally()
        soak.one_episode(LLAMA, tally, EPISODE)
    return tally


EPISODE = [7, 0]
MIXED_EPISODE = [7, 4]


def again(answered: Tally) -> Tally:
    """Returns a tally that knows the oracle's answers, and counted nothing."""
    return Tally(answers=deepcopy(answered.answers))


def changed(function: Callable[..., Trace], change: Callable[[Trace], None]) -> Callable[..., Trace]:
    """Returns the function with its trace changed."""

    def run(*args: Any, **settings: Any) -> Trace:
        trace = function(*args, **settings)
        change(trace)
        return trace

    return run


def test_an_episode_without_a_planted_difference_is_clean(answered: Tally) -> None:
    """The control of all tests below."""
    tally = again(answered)
    soak.one_episode(LLAMA, tally, EPISODE)
    assert answered.differences == tally.differences == []
    assert answered.counts["third_party_tokens"] > 5 and tally.counts["requests_with_states_compared"] > 1


@pytest.mark.parametrize("kind", SOAKED)
def test_a_difference_is_reported(kind: str, answered: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = SOAKED[kind]
    monkeypatch.setattr(soak, "run", changed(soak.run, change))
    tally = again(answered)
    soak.one_episode(LLAMA, tally, EPISODE)
    assert len(tally.differences) == tally.counts["requests_with_states_compared"] > 1
    assert all(said in difference for difference in tally.differences), tally.differences


def test_a_difference_from_hugging_face_is_reported() -> None:
    """The vocabulary of its untouched copy is turned round, so that its greedy answers differ."""
    subject, tally = replace(LLAMA), Tally()
    assert subject.plain is not None and subject.plain is not LLAMA.plain
    with torch.no_grad():
        head: Any = subject.plain.get_output_embeddings()
        head.weight.copy_(head.weight.flip(0))
    soak.one_episode(subject, tally, EPISODE)
    assert len(tally.differences) == len(tally.answers) > 0
    assert all("Hugging Face says" in difference for difference in tally.differences), tally.differences


@pytest.mark.parametrize("kind", MIXED)
def test_a_difference_in_a_mixed_episode_is_reported(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = MIXED[kind]
    monkeypatch.setattr(mixed, "_run", changed(mixed._run, change))
    tally = Tally()
    mixed.mixed_episode(LLAMA, tally, MIXED_EPISODE)
    (difference,) = tally.differences
    assert said in difference


def test_a_mixed_episode_without_a_planted_difference_is_clean() -> None:
    tally = Tally()
    mixed.mixed_episode(LLAMA, tally, MIXED_EPISODE)
    assert tally.differences == [] and tally.counts["mixed_episodes_with_z"] and tally.counts["mixed_readings_compared"]


@pytest.mark.parametrize("kind", ["none", "state C"])
def test_a_stress_test_with_a_difference_is_not_clean(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its figures, in the file and on the screen; the negative control is said to have diverged."""
    monkeypatch.setattr(soak, "MIXED_SHARE", 0.0)
    monkeypatch.setattr(stress_run, "tiny_subjects", lambda: [LLAMA])
    monkeypatch.setattr(stress_run, "near_tie_subjects", list)
    monkeypatch.setattr(stress_run, "real_subjects", list)
    numbers = {"control_unverified_differ": 3, "control_verified_differ": 0}
    monkeypatch.setattr(stress_run, "control_beside", lambda: nullcontext(SimpleNamespace(result=lambda: numbers)))
    if kind in SOAKED:
        monkeypatch.setattr(soak, "run", changed(soak.run, SOAKED[kind][0]))
    figures = run_stress(10, tmp_path, progress=False)
    assert figures["has_passed"] == (kind == "none") and (figures["differences"] == 0) == (kind == "none")
    assert json.loads((tmp_path / "stress.json").read_text()) == figures
