"""The mixed traffic of the determinism benchmark, and the plain timing of a run that records nothing but its steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import cacheprobe as cp
from cacheprobe.arguments import Setup
from cacheprobe.config import EngineConfig
from cacheprobe.drafters.base import Drafter
from cacheprobe.models.base import CachedLM
from cacheprobe.observe.observers import StepLog

NUM_REQUESTS, IN_FLIGHT = 64, 16
PROMPT_TOKENS, NEW_TOKENS = (8, 64), (32, 64)
LAST_ARRIVAL = 80
"""Steps: about a third of those that the run takes."""
CAPACITY = 160


@dataclass(frozen=True)
class Timing:
    """One run of one setting."""

    seconds: float
    tokens: list[list[int]]
    log: StepLog


def traffic(model: CachedLM, seed: int = 0) -> list[cp.Request]:
    """64 requests: coin-flip text cut to 8-64 tokens, 32-64 new tokens each, arriving in the first third."""
    draw = np.random.default_rng(seed)
    examples = cp.tasks.CoinFlip(people=4, shots=2).examples(n=NUM_REQUESTS, seed=seed)
    requests = []
    for example in examples:
        length, new = (int(draw.integers(low, high + 1)) for low, high in (PROMPT_TOKENS, NEW_TOKENS))
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
    model: CachedLM, requests: Sequence, config: EngineConfig, drafter: Drafter | None = None, path: str = "auto"
) -> Timing:
    """Wall-clock seconds of the loop alone; arguments are resolved before the clock starts."""
    setup = Setup(model, requests, config, capture=None, path=path)
    states, start, log = setup.states(drafter), setup.start(drafter), StepLog()
    began = time.perf_counter()
    for _ in start(states, log):
        pass
    seconds = time.perf_counter() - began
    return Timing(seconds, [list(log.finished[r.request_id].committed) for r in setup.requests], log)
