"""Supplies the traffic and prompts of benchmarks, and times a run that records nothing but its steps."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Finished, Observer, StepRecord
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.execution import Execution, prepare
from cacheprobe.engine.plan import make_plan
from cacheprobe.models.base import CachedLM

PROMPTS = Path(__file__).parents[1] / "prompts"
NUM_REQUESTS, IN_FLIGHT = 64, 16
PROMPT_TOKENS, NEW_TOKENS = (8, 64), (32, 64)
LAST_ARRIVAL = 80
"""Steps: about a third of those that the run takes."""


class StepLog(Observer):
    """Keeps a run's step records and how each request ended; keeps no tensors."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.finished: dict[int, Finished] = {}

    def on_step(self, record: StepRecord) -> None:
        """Appends the step's record to `steps`."""
        self.steps.append(record)

    def on_finish(self, finished: Finished) -> None:
        """Stores how a request ended in `finished`, by request id."""
        self.finished[finished.request_id] = finished


@dataclass(frozen=True)
class Timing:
    """One run of one setting."""

    seconds: float
    tokens: list[list[int]]
    log: StepLog


def stored_prompts(name: str) -> list[str]:
    """Returns the texts of "repeat" or "coin". Raises: ValueError if their file is not here."""
    path = PROMPTS / f"{name}.jsonl"
    if not path.exists():
        raise ValueError(f"{path} is missing; run the benchmark from a checkout")
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def traffic(
    model: CachedLM, seed: int = 0, num_requests: int = NUM_REQUESTS, new_tokens: tuple[int, int] = NEW_TOKENS
) -> list[cp.Request]:
    """Returns requests of coin-flip text cut to 8-64 tokens, arriving in the first third.

    new_tokens: the fewest and the most of one request.
    """
    draw = np.random.default_rng(seed)
    examples = cp.tasks.CoinFlip(people=4, shots=2).examples(n=num_requests, seed=seed)
    requests = []
    for example in examples:
        length, new = (int(draw.integers(low, high + 1)) for low, high in (PROMPT_TOKENS, new_tokens))
        sampling = cp.SamplingParams(max_new_tokens=new, stop_token_ids=())
        arrival = int(draw.integers(0, LAST_ARRIVAL))
        requests.append(cp.Request(model.encode(example.prompt)[:length], sampling, arrival_step=arrival))
    return sorted(requests, key=lambda request: request.arrival_step)


def marked(requests: Sequence[cp.Request], share: float, seed: int = 1) -> list[cp.Request]:
    """The same requests with this share of them deterministic, drawn at random."""
    count = round(share * len(requests))
    chosen = set(np.random.default_rng(seed).permutation(len(requests))[:count].tolist())
    return [replace(request, is_deterministic=i in chosen) for i, request in enumerate(requests)]


def timed(
    model: CachedLM,
    requests: Sequence,
    config: "EngineConfig | Mapping[str, Any]",
    drafter: Drafter | None = None,
    path: str = "auto",
) -> Timing:
    """Wall-clock seconds of the loop alone; arguments are resolved before the clock starts."""
    run = Run(model, requests, config, drafter, path)
    began = time.perf_counter()
    for _ in run.steps():
        pass
    return run.timing(time.perf_counter() - began)


class Run:
    """A run that can be stepped, and says how far it is."""

    def __init__(
        self, model: CachedLM, requests: Sequence, config: "EngineConfig | Mapping[str, Any]",
        drafter: Drafter | None = None, path: str = "auto", capture: str | None = None,
    ) -> None:  # fmt: skip
        """config: every shape, or those fields alone that `cp.run` would be given."""
        settings = vars(config) if isinstance(config, EngineConfig) else config
        prepared = prepare(
            make_plan(model, requests, {**settings, "drafter": drafter, "capture": capture, "path": path})
        )
        self.requests, self.states = prepared.plan.requests, prepared.states
        self.total = sum(state.num_left for state in self.states)
        self.log = StepLog()
        is_recorded = capture is not None
        execution = Execution(prepared, [self.log], kind="run", drafter=None) if is_recorded else None
        self._rounds = prepared.rounds(self.log) if execution is None else execution.steps()

    def steps(self) -> Iterator[float]:
        """Round by round; yields the share of the new tokens that are committed."""
        for _ in self._rounds:
            yield 1 - sum(state.num_left for state in self.states if not state.finish) / self.total

    def timing(self, seconds: float) -> Timing:
        """What it came to."""
        return Timing(seconds, [list(self.log.finished[r.request_id].committed) for r in self.requests], self.log)


def side_by_side(
    jobs: Mapping[str, Iterator[float]], report: Callable[[float], None] = lambda share: None
) -> dict[str, float]:
    """Seconds of each job, all of them run in turn in small steps, whichever is farthest behind: a machine that is
    slower for a minute is then slower for all of them alike.

    jobs: each yields the share of its work that is done, after every step.  report: called with the share of all work.
    """
    seconds, done = dict.fromkeys(jobs, 0.0), dict.fromkeys(jobs, 0.0)
    while done:
        report((sum(done.values()) + len(jobs) - len(done)) / len(jobs))
        name = min(done, key=done.__getitem__)
        began = time.perf_counter()
        share = next(jobs[name], None)
        seconds[name] += time.perf_counter() - began
        if share is None:
            del done[name]
        else:
            done[name] = share
    return seconds
