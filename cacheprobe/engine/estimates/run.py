"""Estimates what a run will take: counts its passes by arithmetic, times two short runs, and multiplies.

An estimate may cost a twentieth of its run at most. So a run that is not much longer than the two short runs together
has no estimated time.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from cacheprobe.core.records import Observer, StepRecord
from cacheprobe.core.terminal import duration
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.engine.drafters.scripted import Scripted
from cacheprobe.engine.estimates.count import RunCount, count_run
from cacheprobe.engine.execution import PreparedRun, prepare
from cacheprobe.engine.plan import RunPlan
from cacheprobe.engine.sizes import READING_BYTES, TOKEN_BYTES, available_bytes, bytes_text, cache_slots
from cacheprobe.kvcache.recurrent import bytes_of_states
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.recording.lens_reader import LENS_TILE
from cacheprobe.trace.recording.observers import Tee
from cacheprobe.trace.recording.recorder import Recorder

RUN_DISK_BYTES, ROW_DISK_BYTES, READING_DISK_BYTES, READ_TOKEN_DISK_BYTES = 30_000, 30, 8, 5
"""Bytes on disk of a run without rows, of a row with its events and ledger, of a lens reading, and of each token of a
reading. Measured: saved runs of SmolLM2 with 16 requests x 32 tokens."""
SHORT_RUNS = ((8, 17), (4, 5), (2, 3))
"""(Requests, new tokens of each) of the longer of the two short runs, at most: the first with which both are short
enough. Without drafts, 2 new tokens are enough."""
SHORT_PROMPT = 2
"""Tokens of a prompt of a short run, at most."""
PASS_ROWS = 8
"""Rows whose computation takes about as long as a pass by itself: SmolLM2 on two cores."""
TIMES_LONGER = 20
"""A run has an estimated time if it is this many times longer than the two short runs."""
_REMEDY = "capture fewer sites, layers, positions or phases, lower max_new_tokens, or split the prompts over runs"


class Bounds(NamedTuple):
    """Holds the smallest, the likely and the largest value. All are equal if nothing is drafted."""

    least: float
    """If the verifier accepts every draft token."""
    likely: float
    """If the verifier accepts the same part of the draft tokens that it compares as in the two short runs."""
    most: float
    """If the verifier rejects every draft token."""

    def text(self, unit: str = "") -> str:
        """Returns the likely value as text, in bytes, in seconds or without a unit, and the bounds if they differ."""
        kinds = {"bytes": _megabytes, "seconds": duration, "": lambda value: f"{value:,.0f}"}
        low, likely, high = (kinds[unit](value) for value in self)
        return likely if low == high else f"{likely} ({low} to {high})"


@dataclass(frozen=True, repr=False)
class Estimate:
    """Holds what a run is expected to take: tokens, passes, memory, disk space and seconds.

    Every request is assumed to generate all its new tokens; `assumptions` says what else was assumed. Passes are exact
    for runs without drafts, late arrivals, preemption and shared prompts, except that the engine may add a twentieth to
    the verify passes. With drafts, late arrivals or shared prompts they are within a factor of two.
    """

    num_requests: int
    prompt_tokens: int
    """Tokens of all prompts; each sample of a prompt (SamplingParams.n) counts."""
    new_tokens: int
    """Largest number of tokens that the run generates."""
    prefill_passes: Bounds
    decode_passes: Bounds
    """Passes of one token a request, those of a drafter that runs the model included."""
    verify_passes: Bounds
    rows: Bounds
    """Recorded rows; a row is one token of one pass."""
    readings: Bounds
    """Lens readings: of each row that is read, one for each layer."""
    cache_bytes: int
    """KV cache, as `KVCache.cache_bytes`."""
    state_bytes: Bounds
    """Recorded states and head activations, as they lie in the trace."""
    disk_bytes: Bounds
    """All files of `trace.save`."""
    peak_bytes: Bounds
    """Largest memory of the run beyond the model: cache and records."""
    available_bytes: int | None
    """Memory that was available on the machine when the estimate was made; None if unknown."""
    seconds: Bounds | None
    """Time of `cp.run`, without loading the model and without saving; None for a run too short to be measured."""
    assumptions: tuple[str, ...] = ()

    def __repr__(self) -> str:
        passes = ", ".join(
            f"{getattr(self, f'{phase}_passes').text()} {phase}" for phase in ("prefill", "decode", "verify")
        )
        of = f" of {_megabytes(self.available_bytes)} available" if self.available_bytes is not None else ""
        too_short = f"not measured: the run is less than {TIMES_LONGER} times as long as a measurement"
        lines = [
            f"Estimate of {self.num_requests} requests: {self.prompt_tokens:,} prompt tokens, up to "
            f"{self.new_tokens:,} new tokens",
            f"  passes:  {passes}; {self.rows.text()} rows",
            f"  memory:  {self.peak_bytes.text('bytes')} at most{of}: cache {_megabytes(self.cache_bytes)}, states "
            f"{self.state_bytes.text('bytes')}",
            f"  disk:    {self.disk_bytes.text('bytes')}",
            f"  time:    {self.seconds.text('seconds') if self.seconds else too_short}",
            *(f"  assumed: {assumption}" for assumption in self.assumptions),
        ]
        return "\n".join(lines)

    def require_memory(self) -> None:
        """Checks the memory of the machine. Raises: ValueError if the run needs more than is available even if every
        draft token is accepted; the message says what to change."""
        if self.available_bytes is not None and self.peak_bytes.least > self.available_bytes:
            raise ValueError(
                f"the run needs about {bytes_text(round(self.peak_bytes.least))} of memory, of which the cache "
                f"{_megabytes(self.cache_bytes)}, states {_megabytes(self.state_bytes.least)}; "
                f"{bytes_text(self.available_bytes)} are available; {_REMEDY}"
            )

    def require_disk(self, directory: Path) -> None:
        """Checks the disk of a directory for the saved run. Raises: ValueError if the disk has less space than the run
        takes even if every draft token is accepted; the message says what to change."""
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if self.disk_bytes.least > free:
            raise ValueError(
                f"the saved run needs about {bytes_text(round(self.disk_bytes.least))} in {directory}; "
                f"{bytes_text(free)} are free; {_REMEDY}, or save to another disk"
            )


def _megabytes(count: float) -> str:
    """Returns a number of bytes as text, in MB or GB of 10**6 or 10**9 bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def estimate_plan(plan: RunPlan) -> Estimate:
    """Returns the Estimate of a plan's run. Applies no intervention and calls no drafter of the user.

    Raises: ValueError for a Thinking States model, whose thoughts cost what their texts need, and for a run that needs
    more memory than is available.
    """
    if getattr(getattr(plan.model, "config", None), "thinks", False):
        raise ValueError(
            f"{plan.model.name} is a Thinking States model, whose run cannot be estimated: its time and its records "
            "depend on the thoughts that it writes; use the same model without thoughts, or run a part"
        )
    run = prepare(plan)
    plan, states = run.plan, run.states
    best, worst = count_run(run, 1.0), count_run(run, 0.0)
    is_own = type(plan.drafter).__module__.startswith("cacheprobe.") and not isinstance(plan.drafter, Scripted)
    seconds_of, rate = _time_short_runs(run, best, is_own)
    likely = best if rate is None else count_run(run, rate)
    cache_bytes, held_bytes = _cache_bytes(plan, states)
    reading_bytes = READING_DISK_BYTES + READ_TOKEN_DISK_BYTES * plan.capture.top_k

    def bounds(value: Callable[[RunCount], float]) -> Bounds:
        """Returns a value of the run with the best, the likely and the worst drafts."""
        return Bounds(value(best), value(likely), value(worst))

    how = "every one" if rate is None else f"{rate:.0%}, as in two short runs"
    assumptions = {
        "every request generates all its new tokens; a request that stops earlier takes less": True,
        f"accepted draft tokens: {how}; in brackets, the numbers if every one is, and if none is": best != worst,
        f"the drafter {getattr(plan.drafter, 'name', '')} itself takes no time": plan.drafter and not is_own,
        "the predicate keep of CaptureConfig keeps every row": plan.capture.keep is not None,
        "interventions take no time": plan.interventions,
    }
    estimate = Estimate(
        num_requests=len(states),
        prompt_tokens=sum(state.request.num_prompt_tokens for state in states),
        new_tokens=sum(state.num_left for state in states),
        prefill_passes=bounds(lambda run: run.passes["prefill"]),
        decode_passes=bounds(lambda run: run.passes["decode"]),
        verify_passes=bounds(lambda run: run.passes["verify"]),
        rows=bounds(lambda run: run.rows),
        readings=bounds(lambda run: run.readings),
        cache_bytes=cache_bytes,
        state_bytes=bounds(lambda run: run.state_bytes),
        disk_bytes=bounds(
            lambda run: RUN_DISK_BYTES + run.state_bytes + ROW_DISK_BYTES * run.rows + reading_bytes * run.readings
        ),
        # a site's tensors exist twice while the passes of the run are joined
        peak_bytes=bounds(
            lambda run: held_bytes + 2 * run.state_bytes + TOKEN_BYTES * run.rows + READING_BYTES * run.readings
        ),
        available_bytes=available_bytes() if plan.model.device.type == "cpu" else None,
        seconds=None if seconds_of is None else Bounds(*sorted(bounds(seconds_of))),
        assumptions=tuple(text for text, is_assumed in assumptions.items() if is_assumed),
    )
    estimate.require_memory()
    return estimate


def _cache_bytes(plan: RunPlan, states: Sequence[SequenceState]) -> tuple[int, int]:
    """Returns the bytes of the cache, and those with kept copies of it and a draft model's cache."""
    probe, config = plan.model.new_cache(1, 1), plan.config
    in_flight, slot_bytes = min(len(states), config.max_batch), probe.cache_bytes - bytes_of_states(probe, 1, 1)
    needed = [config.slots_needed(state.request.num_prompt_tokens, state.num_left) for state in states]
    of_cache = slot_bytes * cache_slots(config, needed, plan.model.device)
    of_cache += bytes_of_states(probe, in_flight + 1, config.capacity, config.prefill_chunk)
    kept = sum(count for count, state in zip(needed, states, strict=True) if state.request.keep_kv)
    held = of_cache + slot_bytes * kept
    if isinstance(plan.drafter, DraftModel):
        held += plan.drafter.model.new_cache(1, 1).cache_bytes * in_flight * max(needed)
    return of_cache, held


# -- two short runs


class _ShortRun(Observer):
    """Counts passes, their token slots, and the draft tokens that the verifier accepted and compared."""

    def __init__(self) -> None:
        self.num_passes = self.slots = self.num_accepted = self.num_compared = 0

    def on_step(self, record: StepRecord) -> None:
        """Adds a step. No token after a rejected one was compared."""
        batch, width = record.batch_shape or (0, 0)
        self.num_passes, self.slots = self.num_passes + (batch > 0), self.slots + batch * width
        self.num_accepted += sum(verdict.num_accepted for verdict in record.verdicts)
        self.num_compared += sum(verdict.num_accepted + verdict.is_rollback for verdict in record.verdicts)


def _time_short_runs(
    run: PreparedRun, whole: RunCount, calls_drafter: bool
) -> tuple[Callable[[RunCount], float] | None, float | None]:
    """Runs one request, then several, with short prompts and few new tokens, and discards the results.

    Returns (a function that gives the seconds of a counted run, the accepted part of the compared draft tokens). The
    first is None if the run is less than TIMES_LONGER times as long, the second if no token was compared.
    """
    plan = replace(run.plan, drafter=run.plan.drafter if calls_drafter else None)
    is_drafted = whole.num_draft > 0 < whole.passes["verify"]
    # drawn: every n-th request might have the same prompt each time
    drawn = Random(0).sample(run.states, min(len(run.states), SHORT_RUNS[0][0]))

    def short_run(most_requests: int, most_new: int) -> PreparedRun:
        """Returns a run of new requests."""
        states = [_shortened(state, most_new if is_drafted else 2) for state in drawn[:most_requests]]
        return replace(run, plan=plan, states=states, editor=None)

    for most_requests, most_new in SHORT_RUNS:
        one, several = (count_run(short_run(most, most_new), 1.0) for most in (1, most_requests))
        if _cost(whole, plan) >= TIMES_LONGER * (_cost(one, plan, has_readings=False) + _cost(several, plan)):
            break
    else:
        return None, None
    measured, seconds, of_tiles = [_ShortRun(), _ShortRun()], list[float](), 0.0
    for observer, most in zip(measured, (1, most_requests), strict=True):
        short = short_run(most, most_new)
        prompts = {state.request_id: state.request.prompt_token_ids for state in short.states}
        recorder = Recorder(plan.model, plan.recorded_capture, plan.layers, plan.lens, prompts)
        with hold_model(plan.model), short.hooks(recorder):
            began = time.perf_counter()
            for _ in short.rounds(Tee(recorder, observer)):
                pass
            ended = time.perf_counter()
            if observer is measured[-1]:
                recorder.take()
                of_tiles = time.perf_counter() - ended
        seconds.append(ended - began)
    terms = np.array([(one.num_passes, one.slots) for one in measured], dtype=float)
    of_pass, of_slot = np.linalg.lstsq(terms, np.array(seconds), rcond=None)[0].clip(0).tolist()
    of_tile = of_tiles / max(several.num_tiles, 1)
    num_compared = sum(one.num_compared for one in measured)
    rate = sum(one.num_accepted for one in measured) / num_compared if num_compared else None
    return lambda run: run.num_passes * of_pass + run.slots * of_slot + run.num_tiles * of_tile, rate


def _shortened(state: SequenceState, most_new: int) -> SequenceState:
    """Returns a new state of a request with a part of its prompt and of its new tokens, which no token ends."""
    request, num_new = state.request, min(state.num_left, most_new)
    sampling = replace(state.sampling, max_new_tokens=num_new, stop=(), stop_token_ids=())
    prompt, forced = request.prompt_token_ids[:SHORT_PROMPT], request.forced_token_ids[:num_new]
    request = replace(request, prompt_token_ids=prompt, forced_token_ids=forced, arrival_step=0)
    request = replace(request, cached=None, keep_kv=False)
    return SequenceState(request, state.is_verified, sampling, state.decode, state.is_invariant)


def _cost(count: RunCount, plan: RunPlan, has_readings: bool = True) -> float:
    """Returns about how long a run takes, in computed rows. has_readings: include those of the lens."""
    tile_rows = LENS_TILE * plan.model.d_vocab / (12 * plan.model.n_layers * plan.model.d_model)  # as many products
    return count.rows + PASS_ROWS * count.num_passes + count.num_tiles * tile_rows * has_readings
