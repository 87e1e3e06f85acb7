"""Benchmarked runs that advance in turn: each is the run it would be alone, and the one farthest behind goes next."""

from collections.abc import Iterator

import pytest

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe_benchmarks.shared.workload import Run, side_by_side, timed
from tests.planted_costs import HOUR, Clock
from tests.tiny import loaded

CONFIG = EngineConfig(window=2, group=2, capacity=48, max_batch=2)


def test_runs_side_by_side_are_the_runs_alone():
    model = loaded()
    sampling = cp.SamplingParams(max_new_tokens=9, stop_token_ids=())
    requests = [cp.Request([3 + i, 5, 7], sampling, is_deterministic=i % 2 == 0, arrival_step=i) for i in range(4)]
    runs = {name: Run(model, requests, CONFIG) for name in ("one", "other")}
    seconds = side_by_side({name: run.steps() for name, run in runs.items()})
    alone = timed(model, requests, CONFIG)
    for name, run in runs.items():
        assert run.timing(seconds[name]).tokens == alone.tokens
        assert len(run.log.steps) == len(alone.log.steps)


def test_the_seconds_of_a_job_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of one job takes an hour, and each step of the other three, in whatever order they go."""
    clock = Clock(monkeypatch)

    def job(hours: float, steps: int) -> Iterator[float]:
        for number in range(1, steps + 1):
            clock.skip(hours)
            yield number / steps

    seconds = side_by_side({"one": job(1, 4), "other": job(3, 2)})
    assert seconds == pytest.approx({"one": 4 * HOUR, "other": 6 * HOUR}, rel=0.01)


def test_a_run_alone_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.plant(Run, "timing", 5)  # behind the end of the run: it does not count
    steps = Run.steps

    def slower(run: Run) -> Iterator[float]:
        for share in steps(run):
            clock.skip(2)
            yield share

    monkeypatch.setattr(Run, "steps", slower)
    sampling = cp.SamplingParams(max_new_tokens=4, stop_token_ids=())
    assert timed(loaded(), [cp.Request([3, 5, 7], sampling)], CONFIG).seconds == pytest.approx(6 * HOUR, rel=0.01)


def test_whichever_is_farthest_behind_goes_next():
    order = []

    def job(name, shares):
        for share in shares:
            order.append(name)
            yield share

    side_by_side({"small": job("small", [0.25, 0.5, 0.75, 1.0]), "large": job("large", [0.5, 1.0])})
    assert order == ["small", "large", "small", "small", "large", "small"]


def test_a_run_says_what_share_of_its_tokens_is_committed():
    sampling = cp.SamplingParams(max_new_tokens=4, stop_token_ids=())
    shares = list(Run(loaded(), [cp.Request([3, 5, 7], sampling)], CONFIG).steps())
    assert shares == [0.5, 0.75, 1.0]  # the prompt's pass commits one, and the first decode follows in its round
