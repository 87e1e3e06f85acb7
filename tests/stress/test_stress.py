"""The stress test goes on where it stopped, sees planted faults, and is void without its negative control."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from cacheprobe.core.records import ForwardRecord, Request
from cacheprobe.engine import choosing
from cacheprobe.engine.drafters.fast_path import FastPath
from cacheprobe.engine.drafters.ngram import NGram
from cacheprobe.stress import control, soak
from cacheprobe.stress import run as stress_run
from cacheprobe.stress.mixed import mixed_episode
from cacheprobe.stress.run import run_stress
from cacheprobe.stress.soak import kind_of_rollback, one_episode
from cacheprobe.stress.subjects import near_tie_subjects, real_subjects, tiny_subjects
from cacheprobe.stress.tally import Tally
from cacheprobe.stress.traffic import Corrupted, Episode, draw_episode, draw_request
from cacheprobe.trace.recording.recorder import Recorder

pytestmark = pytest.mark.determinism

LLAMAS = [subject for subject in tiny_subjects() if subject.name == "llama"]
"""In three dtypes; loaded once for all tests."""
NEAR_TIE = near_tie_subjects()[0]


@pytest.fixture(scope="module", autouse=True)
def small_episodes() -> Iterator[None]:
    with (
        patch.object(soak, "MOST_REQUESTS", {"tiny": 4, "near_ties": 4}),
        patch.object(stress_run, "tiny_subjects", lambda: LLAMAS),
        patch.object(stress_run, "near_tie_subjects", lambda: [NEAR_TIE]),
    ):
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("stress")
    return out, run_stress(400, out, real=False, progress=False)


def test_a_short_stress_test_finds_no_difference(result: tuple[Path, dict]) -> None:
    out, figures = result
    assert figures["differences"] == 0 and figures["compared_tokens"] >= 400
    assert 0 < figures["distinct_tokens"] < figures["compared_tokens"]
    assert set(figures["compared_by_dtype"]) == {"bfloat16", "float16", "float32"} and figures["models"] == 2
    assert figures["rollbacks_injected"] > 0 and figures["requests_deterministic"] > 0
    assert json.loads((out / "stress.json").read_text()) == figures
    assert not figures["has_passed"] and figures["negative_control"] == "not run"


def test_it_goes_on_where_it_stopped(result: tuple[Path, dict]) -> None:
    out, before = result
    after = run_stress(before["compared_tokens"] + 100, out, real=False, progress=False)
    assert after["episodes"] > before["episodes"] and after["compared_tokens"] >= before["compared_tokens"] + 100
    assert after["distinct_tokens"] >= before["distinct_tokens"]


def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that accepts one candidate too many, once the oracle has answered."""
    subject, tally = LLAMAS[0], Tally()
    for episode in range(2):
        one_episode(subject, tally, [1, episode])
    assert not tally.differences
    right = choosing.num_accepted
    monkeypatch.setattr(choosing, "num_accepted", lambda d, t: min(right(d, t) + 1, len(d)))
    for episode in range(2):
        one_episode(subject, tally, [1, episode])
    assert tally.differences and "tokens" in tally.differences[0]


def test_twins_disagree_by_themselves() -> None:
    """The fast path says another token than the verifier, and what is committed is the oracle's."""
    subject, tally = NEAR_TIE, Tally()
    for episode in range(2):
        one_episode(subject, tally, [3, episode])
    assert tally.natural[subject.key] == tally.counts["rollbacks_natural"] > 0 and not tally.differences


def test_what_counts_as_natural() -> None:
    """Only the fast path's own candidate, and only where a verdict is no matter of chance."""
    replaced = Corrupted(FastPath(), 0.5, np.random.default_rng(0), {(0, 7)})
    request = Request([1], request_id=0, is_deterministic=True)
    free = Request([1], request_id=0)

    def kind(drafter: object, request: Request, acceptance: str = "equality") -> str:
        return kind_of_rollback(Episode((request,), (0,), drafter, {"acceptance": acceptance}), request, 7)

    assert (kind(replaced, request), kind(replaced, free)) == ("injected", "injected")
    assert kind(None, request) == kind(FastPath(), free) == kind(FastPath(), request, "rejection") == "natural"
    assert kind(NGram(), request) == kind(FastPath(), free, "rejection") == "other"
    replaced.altered.clear()
    assert kind(replaced, request) == "natural"


def test_another_schedule_is_refused() -> None:
    """Answers that were kept under one schedule say nothing about another."""
    subject, tally = LLAMAS[0], Tally()
    one_episode(subject, tally, [2, 0])
    tally.fingerprints[subject.key] = {**tally.fingerprints[subject.key], "threads": 99}
    with pytest.raises(ValueError, match=r"another schedule \(threads\)"):
        one_episode(subject, tally, [2, 1])


@pytest.mark.parametrize(("unverified", "verified", "has_passed"), [(3, 0, True), (0, 0, False), (3, 1, False)])
def test_void_without_divergence(
    unverified: int, verified: int, has_passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {"control_unverified_differ": unverified, "control_verified_differ": verified}
    monkeypatch.setattr(stress_run, "real_subjects", lambda: LLAMAS[:1])
    monkeypatch.setattr(stress_run, "tiny_subjects", lambda: LLAMAS[:1])
    monkeypatch.setattr(stress_run, "near_tie_subjects", list)
    monkeypatch.setattr(stress_run, "control_beside", lambda: nullcontext(SimpleNamespace(result=lambda: numbers)))
    assert run_stress(50, tmp_path, progress=False)["has_passed"] is has_passed


def test_a_control_that_cannot_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process finds a broken install: the stress test ends with what it said, and no process is left."""
    (tmp_path / "transformers.py").write_text("raise ImportError('half installed')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with control.control_beside() as beside, pytest.raises(control.ControlError, match=r"(?s)half installed.*again"):
        beside.result()
    with pytest.raises(KeyboardInterrupt), control.control_beside() as beside:
        raise KeyboardInterrupt
    assert beside._process.returncode == -signal.SIGKILL


def test_traffic_draws_every_kind() -> None:
    """Settings, drafters and shapes that the loop has, each in some request or episode."""
    requests = [draw_request(LLAMAS[0], number).sampling for number in range(60)]
    for name, plain in (("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0), ("repetition_penalty", 1)):
        assert {getattr(sampling, name) == plain for sampling in requests} == {True, False}, name
    episodes = [draw_episode(LLAMAS[0], seed, [0, 1]) for seed in range(80)]
    drafters = {"none", "fast_path", "early_exit", "ngram", "draft_model"}
    assert {episode.drafter_name for episode in episodes} == drafters
    assert len({(s.window, s.group, s.prefill_group) for s in tiny_subjects()}) == 6
    shapes = {(s.window, s.group) for s in real_subjects()}
    assert {(16, 4), (1, 16)} < shapes and any(s.prefill_group > 1 for s in real_subjects())


def test_heads_preemptions_interventions_streams_and_cancellations_together() -> None:
    """All of them in the same episodes, and every state, head and reading is the oracle's."""
    tally = Tally()
    for episode in range(15):
        mixed_episode(LLAMAS[episode % 3], tally, [6, episode])
    counts, sites = tally.counts, [f"mixed_episodes_with_{site}" for site in ("q", "k", "v", "z", "pattern")]
    others = ("interventions", "streams", "streams_abandoned", "requests_cancelled", "preemptions", "tokens")
    kinds = [*sites, *(f"mixed_{name}" for name in others), "mixed_episodes_with_all_together"]
    assert not tally.differences and [kind for kind in kinds if not counts[kind]] == []
    assert counts["mixed_states_and_heads_compared"] > 1000 and counts["mixed_readings_compared"] > 300
    assert set(kinds) < set(tally.numbers())


def test_heads_of_another_pass_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recorder whose last block of heads stays open after its pass."""
    right = Recorder.after_forward

    def stale(recorder: Recorder, record: ForwardRecord) -> None:
        now = recorder._now
        right(recorder, record)
        assert now is not None
        recorder._now = replace(now, states={}, lens_block=None, watched=None)

    monkeypatch.setattr(Recorder, "after_forward", stale)
    tally = Tally()
    for episode in range(6):
        mixed_episode(LLAMAS[0], tally, [6, episode])
    assert any("site" in difference for difference in tally.differences), tally.differences


def test_mixed_episodes_are_part_of_a_stress_test_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "MIXED_SHARE", 0.5)
    before = run_stress(100, tmp_path, real=False, progress=False)
    after = run_stress(before["compared_tokens"] + 60, tmp_path, real=False, progress=False)
    assert after["mixed_episodes"] >= before["mixed_episodes"] and after["mixed_episodes"] > 0
    assert after["differences"] == 0 and after["episodes"] > after["mixed_episodes"]
