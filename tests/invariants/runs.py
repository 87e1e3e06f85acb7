"""Runs for the invariants: watched round by round, alone or in a random batch, and compared to the last bit."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

from torch import Tensor

import cacheprobe as cp
from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Observer, Request, SamplingParams
from cacheprobe.engine.execution import Execution, prepare
from cacheprobe.engine.plan import make_plan
from cacheprobe.engine.shapes import narrow_widths, serving_config
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.ops.equality import bitwise
from cacheprobe_benchmarks.shared.workload import StepLog
from tests.invariants.machines import Spy
from tests.tiny import VOCAB

W, G, CHUNK, CAPACITY, NEW = 4, 3, 8, 64, 12
SHAPES = dict(window=W, group=G, capacity=CAPACITY, prefill_chunk=CHUNK, pad_prefill=True)
RUN = dict(**SHAPES, max_new_tokens=NEW, progress=False)
"""Small, and every number different, so that no two of them can be taken for each other."""

HOT = SamplingParams(temperature=0.9, seed=7)
"""Keyed noise keeps tiny models from repeating themselves; the same seed for all."""

PROMPTS = [[5, 6, 7, 8, 9], [41], [3] * 7, [11, 12, 13, 14, 15, 16, 17, 18], [*range(20, 31)]]


class Outcome(NamedTuple):
    """All that is promised about a deterministic request."""

    tokens: list[int]
    logprobs: list[float]
    digest: str
    """Tokens, log-probabilities and canonical S, T, C."""
    readings: list[tuple]
    """Z of the canonical rows."""
    finish: str


def outcome(trace: cp.Trace, request_id: int = 0) -> Outcome:
    readings = []
    if trace.hypothesis_table is not None:
        table = trace.hypotheses()
        table = table[(table.request_id == request_id) & (table.status == "committed")]
        columns = ["position", "layer", "token_id", "logprob_nats", "entropy_nats", "rank", "committed_logprob_nats"]
        readings = [tuple(map(str, row)) for row in table.sort_values(["position", "layer"])[columns].to_numpy()]
    return Outcome(
        trace.committed(request_id),
        trace.logprobs(request_id),
        trace.digest(request_id),
        readings,
        trace.meta["finish"][str(request_id)],
    )


class Log(StepLog):
    """Keeps the preemptions too."""

    def __init__(self) -> None:
        super().__init__()
        self.preemptions: list[tuple[int, int]] = []

    def on_preempt(self, request_id: int, step: int) -> None:
        self.preemptions.append((request_id, step))


class Watched:
    """A run whose cache, states and passes are open to view between rounds; iterate over it to run it."""

    def __init__(
        self, model: CachedLM, prompts: Any, *observers: Any, drafter: Any = None, capture: Any = None, **settings: Any
    ) -> None:
        settings = {**SHAPES, "max_new_tokens": NEW, **settings}
        names = [field.name for field in fields(EngineConfig)]
        self.config = EngineConfig(**{name: settings.pop(name) for name in names if name in settings})
        self.spy = model if isinstance(model, Spy) else Spy(model)
        serving_config(self.spy.inner, self.config)
        narrow_widths(self.spy.inner, self.config)
        given = {**vars(self.config), "drafter": drafter, "capture": capture, **settings}
        self.prepared = prepare(make_plan(self.spy, prompts, given))
        self.states = self.prepared.states
        self.log = Log()
        self.trace: cp.Trace | None = None
        meta = {"kind": "run", "drafter": repr(drafter) if drafter else None}
        for observer in observers:
            observer.run = self
        self._steps = Execution(self.prepared, [self.log, *observers], **meta).steps()

    def __iter__(self) -> Iterator[int]:
        while True:
            try:
                yield next(self._steps)
            except StopIteration as end:
                self.trace = end.value
                return

    def finished(self) -> "Watched":
        """Run to the end."""
        for _ in self:
            pass
        return self

    @property
    def cache(self) -> KVCache:
        return self.spy.caches[-1]

    @property
    def running(self) -> list[SequenceState]:
        return [state for state in self.states if state.cache_row >= 0]

    def verify_calls(self) -> list[Any]:
        return [call for call in self.spy.calls if call.shape == (self.config.group, self.config.window)]


class AtCommit(Observer):
    """Calls `look(run, state)` whenever a commit has just been written."""

    run: Watched

    def __init__(self, look: Callable[[Watched, SequenceState], None]) -> None:
        self.look = look

    def on_commit(self, request_id: int, *args: Any) -> None:
        self.look(self.run, self.run.states[request_id])


def kv_snapshot(cache: KVCache, row: int, length: int) -> list[Tensor]:
    """Copies of a row's keys and values below `length`, layer by layer."""
    return [held[row, :, :length].clone() for held in (*cache.keys, *cache.values)]


def same_rows(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(bitwise(a, b) for a, b in zip(ours, theirs, strict=True))


def reference_rows(model: CachedLM, prompts: Any, **settings: Any) -> tuple[cp.Trace, list[list[Tensor]]]:
    """The oracle's trace, and each request's keys and values after its last token but one."""
    cp.reference(model, prompts, **{**RUN, "capture": None, "max_new_tokens": 1})  # any trial of the shape is over
    spy = Spy(model)
    trace = cp.reference(spy, prompts, **{**RUN, "capture": None, **settings})
    lengths = [r.num_prompt_tokens + len(trace.committed(i)) - 1 for i, r in enumerate(trace.requests)]
    caches = [
        cache for cache in spy.caches if cache.capacity > 1
    ]  # those of one slot only tell how many bytes it takes
    return trace, [kv_snapshot(cache, 0, length) for cache, length in zip(caches, lengths, strict=True)]


# -- drafts


def future(want: cp.Trace, state: SequenceState, wrong_at: int | None = None, vocab: int = VOCAB) -> list[int]:
    """What the oracle says next, with one token wrong."""
    known = want.committed(state.request_id)[state.num_generated :]
    if wrong_at is not None and wrong_at < len(known):
        known = [*known[:wrong_at], (known[wrong_at] + 1) % vocab, *known[wrong_at + 1 :]]
    return known


def wrong_at(want: cp.Trace, places: Sequence[int | None]) -> cp.drafters.Scripted:
    """First mismatches at these draft places in turn, for each request on its own; None for a right draft."""
    turns: dict[int, int] = {}

    def script(state: SequenceState) -> list[int]:
        turn = turns[state.request_id] = turns.get(state.request_id, -1) + 1
        return future(want, state, places[turn % len(places)])

    return cp.drafters.Scripted(script)


def babbler(seed: int, vocab: int = VOCAB) -> cp.drafters.Scripted:
    """Random tokens, as many as it likes."""
    rng = random.Random(seed)
    return cp.drafters.Scripted(lambda state: [rng.randrange(vocab) for _ in range(rng.randrange(6))])


# -- other requests in the batch


def random_batch(rng: random.Random, needle: Request, vocab: int = VOCAB) -> tuple[list[Request], int, dict[str, Any]]:
    """The needle among random others: (requests, its place, settings that may not matter to it)."""
    requests = []
    for _ in range(rng.randrange(2, 7)):
        sampling = SamplingParams(
            max_new_tokens=rng.randrange(1, NEW + 3), temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(99)
        )
        prompt = [rng.randrange(vocab) for _ in range(rng.randrange(1, 18))]
        arrival = rng.choice([0, 3, 3, rng.randrange(20)]) if requests else 0
        requests.append(Request(prompt, sampling, is_deterministic=rng.random() < 0.5, arrival_step=arrival))
    place = rng.randrange(len(requests) + 1)
    requests.insert(place, needle)
    longest = max(len(r.prompt) + (r.sampling.max_new_tokens or NEW) for r in requests) + W
    settings = {
        "max_batch": rng.choice([rng.randrange(1, len(requests) + 1), len(requests), 64]),
        "max_kv_tokens": rng.choice([None, None, longest, longest + 9]),
        "draft_length": rng.choice(["adaptive", 1, 2, "adaptive"]),
        "drafter": rng.choice([None, None, babbler(rng.randrange(99), vocab), cp.drafters.EarlyExit(layer=1)]),
    }
    return requests, place, settings
