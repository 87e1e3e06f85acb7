"""Estimates what a run will take: counts its passes by the scheduler's rules, times two short runs, and multiplies.

An estimate may cost a twentieth of its run at most. So a run that is not much longer than the two short runs together
has no estimated time.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cacheprobe.core.terminal import duration
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.engine.estimates.count import RunCount
from cacheprobe.engine.estimates.times import TIMES_LONGER, is_own, time_short_runs
from cacheprobe.engine.execution import prepare
from cacheprobe.engine.plan import RunPlan
from cacheprobe.engine.sizes import (
    READING_BYTES,
    TOKEN_BYTES,
    available_bytes,
    bytes_text,
    cache_slots,
)
from cacheprobe.kvcache.recurrent import bytes_of_states

RUN_DISK_BYTES, ROW_DISK_BYTES, READING_DISK_BYTES, READ_TOKEN_DISK_BYTES = 30_000, 30, 8, 5
"""Bytes on disk of a run without rows, of a row with its events and ledger, of a lens reading, and of each token of a
reading. Measured: saved runs of SmolLM2 with 16 requests x 32 tokens."""
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

    Every request is assumed to generate all its new tokens. `assumptions` says what else was assumed.
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
        kinds = {"prefill": self.prefill_passes, "decode": self.decode_passes, "verify": self.verify_passes}
        passes = ", ".join(f"{bounds.text()} {phase}" for phase, bounds in kinds.items())
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
    best = RunCount(run, 1.0)
    worst = RunCount(run, 0.0) if best.num_drafted else best
    clock = time_short_runs(run, best)
    rate = None if clock is None else clock.acceptance
    likely = best if rate is None else RunCount(run, rate)
    probe = plan.model.new_cache(1, 1)
    in_flight = min(len(states), plan.config.max_batch)
    slot_bytes = probe.cache_bytes - bytes_of_states(probe, 1, 1)
    needed = [plan.config.slots_needed(s.request.num_prompt_tokens, s.num_left) for s in states]
    cache_bytes = slot_bytes * cache_slots(plan.config, needed, plan.model.device)
    cache_bytes += bytes_of_states(probe, in_flight + 1, plan.config.capacity, plan.config.prefill_chunk)
    num_positions = [state.request.num_prompt_tokens + state.num_left - 1 for state in states]
    beside = cache_bytes + slot_bytes * sum(
        count for count, state in zip(num_positions, states, strict=True) if state.request.keep_kv
    )
    if isinstance(plan.drafter, DraftModel):
        beside += plan.drafter.model.new_cache(1, 1).cache_bytes * in_flight * max(num_positions)
    reading_bytes = READING_DISK_BYTES + READ_TOKEN_DISK_BYTES * plan.capture.top_k

    def tables(run: RunCount) -> float:
        """Returns the bytes of a run's tables on the disk."""
        return RUN_DISK_BYTES + ROW_DISK_BYTES * run.rows + reading_bytes * run.readings

    def bounds(value: Callable[[RunCount], float]) -> Bounds:
        """Returns a value of the run with the best, the likely and the worst drafts."""
        return Bounds(value(best), value(likely), value(worst))

    estimate = Estimate(
        num_requests=len(states),
        prompt_tokens=sum(state.request.num_prompt_tokens for state in states),
        new_tokens=sum(state.num_left for state in states),
        prefill_passes=bounds(lambda run: run.passes_of("prefill")),
        decode_passes=bounds(lambda run: run.passes_of("decode")),
        verify_passes=bounds(lambda run: run.passes_of("verify")),
        rows=bounds(lambda run: run.rows),
        readings=bounds(lambda run: run.readings),
        cache_bytes=cache_bytes,
        state_bytes=bounds(lambda run: run.state_bytes),
        disk_bytes=bounds(lambda run: run.state_bytes + tables(run)),
        # a site's tensors exist twice while the passes of the run are joined
        peak_bytes=bounds(
            lambda run: beside + 2 * run.state_bytes + TOKEN_BYTES * run.rows + READING_BYTES * run.readings
        ),
        available_bytes=available_bytes() if plan.model.device.type == "cpu" else None,
        seconds=None if clock is None else Bounds(*sorted(bounds(clock.seconds_of))),
        assumptions=_assumptions(plan, best, rate),
    )
    estimate.require_memory()
    return estimate


def _assumptions(plan: RunPlan, best: RunCount, rate: float | None) -> tuple[str, ...]:
    """Returns what the estimate assumed, as texts. rate: part of the draft tokens that the short runs accepted."""
    drafter, how = plan.drafter, "every one" if rate is None else f"{rate:.0%}, as in two short runs"
    said = {
        "every request generates all its new tokens; a request that stops earlier takes less": True,
        f"accepted draft tokens: {how}; in brackets, the numbers if every one is, and if none is": best.num_drafted,
        f"the drafter {getattr(drafter, 'name', '')} itself takes no time": drafter is not None and not is_own(drafter),
        "the predicate keep of CaptureConfig keeps every row": plan.capture.keep is not None,
        "every draft token has a status to keep": plan.capture.statuses is not None and best.num_drafted,
        "features of a dictionary take no space": plan.capture.dictionary is not None,
        "interventions take no time": plan.interventions,
    }
    return tuple(text for text, is_assumed in said.items() if is_assumed)
