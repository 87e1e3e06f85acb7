"""Benchmarked runs that advance in turn: each is the run it would be alone, and the one farthest behind goes next."""

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe_benchmarks.workload import Run, side_by_side, timed
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
        assert seconds[name] > 0


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
