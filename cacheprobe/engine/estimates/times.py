"""Times two short runs, and says how long the passes of a whole run take."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from random import Random

from cacheprobe.core.records import Observer, StepRecord
from cacheprobe.engine.drafters.scripted import Scripted
from cacheprobe.engine.estimates.count import RunCount
from cacheprobe.engine.execution import PreparedRun
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.recording.lens_reader import LENS_TILE
from cacheprobe.trace.recording.observers import Tee
from cacheprobe.trace.recording.recorder import Recorder

SHORT_PROMPT = 2
"""Tokens of a prompt of a short run, at most."""
NEW_TOKENS = 3
"""New tokens of each request of a short run without drafts: the first decode pass is recorded, the second timed."""
MOST_REQUESTS = (8, 4, 2)
"""Requests of the longer of the two short runs, at most: the first number with which both are short enough."""
PASS_ROWS = 8
"""Rows whose computation takes about as long as a pass by itself: SmolLM2 on two cores."""
TIMES_LONGER = 20
"""A run has an estimated time if it is this many times longer than the two short runs."""


@dataclass
class StepTimes(Observer):
    """Measures the steps of short runs, and says how long the steps of the whole run take."""

    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By phase: (token slots, seconds) of each step."""
    num_accepted: int = 0
    num_rejected: int = 0
    """Draft tokens that the verifier accepted, and that it compared and rejected; none after these was compared."""
    tile_seconds: float = 0.0
    """Time in which the lens reads a tile."""
    last: float = 0.0

    def on_step(self, record: StepRecord) -> None:
        """Stores the seconds since the last step."""
        now = time.perf_counter()
        batch, width = record.batch_shape or (0, 0)
        phase, slots = (record.phase, batch * width) if batch else ("draft", len(record.request_ids))
        self.points.setdefault(phase, []).append((slots, now - self.last))
        self.num_accepted += sum(verdict.num_accepted for verdict in record.verdicts)
        self.num_rejected += sum(verdict.is_rollback for verdict in record.verdicts)
        self.last = time.perf_counter()

    @property
    def acceptance(self) -> float | None:
        """Part of the compared draft tokens that were accepted; None if none was compared."""
        num_compared = self.num_accepted + self.num_rejected
        return self.num_accepted / num_compared if num_compared else None

    def seconds_of(self, count: RunCount) -> float:
        """Returns the seconds of a run with these passes: on the line through the measured ones of the phase."""
        _, per_slot = _line(self.points["prefill"], 0.0)
        total = count.num_tiles * self.tile_seconds
        for (phase, slots), number in count.passes.items():
            fixed, slope = _line(self.points.get(phase) or self.points["prefill"], per_slot)
            total += number * (fixed + slope * slots)
        return total


def _line(points: Sequence[tuple[int, float]], slope: float) -> tuple[float, float]:
    """Returns (seconds without a slot, seconds of a slot) of the line through the smallest and the largest pass, the
    quickest of each size: the first ones are recorded for later passes. slope: of a slot, if all have one size."""
    small, most = min(points), max(slots for slots, _ in points)
    large = min(point for point in points if point[0] == most)
    if small[0] < large[0]:
        slope = max((large[1] - small[1]) / (large[0] - small[0]), 0.0)
    return max(large[1] - slope * large[0], 0.0), slope


def is_own(drafter: object) -> bool:
    """Returns True if a drafter is one of cacheprobe's and runs no function or lens of the user."""
    parts = [drafter, *([lens] if (lens := getattr(drafter, "lens", None)) is not None else [])]
    return not isinstance(drafter, Scripted) and all(type(p).__module__.split(".")[0] == "cacheprobe" for p in parts)


def time_short_runs(run: PreparedRun, whole: RunCount) -> StepTimes | None:
    """Runs one request, then several, with short prompts and few new tokens, and discards the results. Returns the
    times of their steps; None if the run is less than TIMES_LONGER times as long, however few they are."""
    plan = replace(run.plan, drafter=run.plan.drafter if is_own(run.plan.drafter) else None)
    for most_requests in MOST_REQUESTS:
        # drawn: every n-th request might have the same prompt each time
        drawn = Random(0).sample(run.states, min(len(run.states), most_requests))
        most_new = NEW_TOKENS
        if whole.num_drafted:
            most_new = max(3, min(plan.config.window + 1, whole.rows // (4 * TIMES_LONGER * most_requests)))
        short_runs = [
            replace(run, plan=plan, states=[_shortened(state, most_new) for state in chosen], editor=None)
            for chosen in (drawn[:1], drawn)
        ]
        counts = [RunCount(short, 1.0) for short in short_runs]
        if _work(whole) >= TIMES_LONGER * (_work(counts[0], has_readings=False) + _work(counts[1])):
            break
    else:
        return None
    times = StepTimes()
    for short, count in zip(short_runs, counts, strict=True):
        prompts = {state.request_id: state.request.prompt_token_ids for state in short.states}
        recorder = Recorder(plan.model, plan.recorded_capture, plan.layers, plan.lens, prompts)
        tapes = getattr(plan.model, "tapes", None)
        hurrying = nullcontext() if tapes is None else tapes.hurrying()
        with hold_model(plan.model), hurrying, short.hooks(recorder):
            times.last = time.perf_counter()
            for _ in short.rounds(Tee(recorder, times)):
                pass
            began = time.perf_counter()
            if short is short_runs[-1] and count.readings:
                recorder.take()
                times.tile_seconds = (time.perf_counter() - began) / count.num_tiles
    return times


def _shortened(state: SequenceState, most_new: int) -> SequenceState:
    """Returns a new state of a request with a part of its prompt and of its new tokens, which no token ends."""
    request = state.request
    sampling = replace(state.sampling, max_new_tokens=min(state.num_left, most_new), stop=(), stop_token_ids=())
    short = replace(
        request,
        prompt_token_ids=request.prompt_token_ids[:SHORT_PROMPT],
        sampling=sampling,
        cached=None,
        keep_kv=False,
        forced_token_ids=request.forced_token_ids[:most_new],
        arrival_step=0,
    )
    return SequenceState(short, state.is_verified, sampling, state.decode, state.is_invariant, state.reads_freely)


def _work(count: RunCount, has_readings: bool = True) -> float:
    """Returns about how long a run takes, in computed rows. has_readings: include those of the lens."""
    model = count.plan.model
    tile_rows = LENS_TILE * model.d_vocab / (12 * model.n_layers * model.d_model)  # products of as many weights
    return count.rows + PASS_ROWS * sum(count.passes.values()) + count.num_tiles * tile_rows * has_readings
