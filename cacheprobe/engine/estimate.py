"""Estimates what a run will take: counts its passes by the scheduler's rules, times two short runs, and multiplies.

An estimate may cost a twentieth of its run at most. So a run that is not much longer than the two short runs together
has no estimated time.
"""

import math
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from cacheprobe.core.records import Observer, StepRecord
from cacheprobe.core.terminal import duration
from cacheprobe.engine.drafters.base import Drafter, drafted_layers
from cacheprobe.engine.drafters.calls import is_own
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.engine.loop import FIRST_DRAFT_LENGTH
from cacheprobe.engine.plan import RunPlan
from cacheprobe.engine.prefill import FREE_PREFILL_WIDTH, pick_prompts
from cacheprobe.engine.sizes import (
    READING_BYTES,
    TOKEN_BYTES,
    available_bytes,
    bytes_text,
    cache_slots,
    state_bytes,
    state_dtype,
)
from cacheprobe.kvcache.recurrent import bytes_of_states
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.recording.lens_reader import LENS_TILE
from cacheprobe.trace.recording.observers import Tee
from cacheprobe.trace.recording.recorder import Recorder

RUN_DISK_BYTES, ROW_DISK_BYTES, READING_DISK_BYTES, READ_TOKEN_DISK_BYTES = 30_000, 30, 8, 5
"""Bytes on disk of a run without rows, of a row with its events and ledger, of a lens reading, and of each token of a
reading. Measured: saved runs of SmolLM2 with 16 requests x 32 tokens."""
SHORT_PROMPT, MOST_REQUESTS = 2, 8
"""Tokens of a prompt, and requests, of the longer of the two short runs, at most."""
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
    """If the verifier accepts the same part of the draft tokens as in the two short runs."""
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


def estimate_plan(plan: RunPlan, drafter: Drafter | None) -> Estimate:
    """Returns the Estimate of a plan's run. Applies no intervention and calls no drafter of the user.

    Raises: ValueError for a Thinking States model, whose thoughts cost what their texts need, and for a run that needs
    more memory than is available.
    """
    if getattr(getattr(plan.model, "config", None), "thinks", False):
        raise ValueError(
            f"{plan.model.name} is a Thinking States model, whose run cannot be estimated: its time and its records "
            "depend on the thoughts that it writes; use the same model without thoughts, or run a part"
        )
    states = plan.states(drafter)
    best, worst = (RunCount(plan, drafter, states, accepted) for accepted in (1.0, 0.0))
    clock = time_short_runs(plan, drafter, states, best)
    rate = None if clock is None else clock.acceptance
    likely = best if rate is None else RunCount(plan, drafter, states, rate)
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
    if isinstance(drafter, DraftModel):
        beside += drafter.model.new_cache(1, 1).cache_bytes * in_flight * max(num_positions)
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
        assumptions=_assumptions(plan, drafter, best, rate),
    )
    estimate.require_memory()
    return estimate


def _assumptions(plan: RunPlan, drafter: Drafter | None, best: "RunCount", rate: float | None) -> tuple[str, ...]:
    """Returns what the estimate assumed, as texts. rate: part of the draft tokens that the short runs accepted."""
    how = "every one" if rate is None else f"{rate:.0%}, as in two short runs"
    said = {
        "every request generates all its new tokens; a request that stops earlier takes less": True,
        f"accepted draft tokens: {how}; in brackets, the numbers if every one is, and if none is": best.num_drafted,
        f"the drafter {getattr(drafter, 'name', '')} itself takes no time": drafter is not None and not is_own(drafter),
        "max_kv_tokens preempts no request": plan.config.max_kv_tokens is not None,
        "the predicate keep of CaptureConfig keeps every row": plan.capture.keep is not None,
        "every draft token has a status to keep": plan.capture.statuses is not None and best.num_drafted,
        "features of a dictionary take no space": plan.capture.dictionary is not None,
        "interventions take no time": plan.interventions,
    }
    return tuple(text for text, is_assumed in said.items() if is_assumed)


# -- passes and rows


@dataclass(eq=False, slots=True)
class _Counted:
    """Follows one request of a run whose passes are counted."""

    state: SequenceState
    left: int
    """Tokens that it has still to commit."""
    cap: int | None
    """Draft tokens that draft_length allows; None for as many as the window takes."""
    draft: int = 0
    is_closed: bool = False
    accepted: float = 0.0
    """Part of a draft token that is accepted and was not counted yet."""

    @property
    def last(self) -> int:
        """Position of the newest committed token."""
        return self.state.request.num_prompt_tokens + self.state.num_left - self.left - 1

    def limit(self, window: int) -> int:
        """Returns the largest number of draft tokens, as `SequenceState.draft_limit`."""
        return min(window - 1, self.left - 1, window if self.cap is None else self.cap)

    def is_ready(self, window: int) -> bool:
        """Returns whether the request waits for the verifier, as `SequenceState.is_ready`."""
        return self.state.is_verified and (self.is_closed or self.draft >= self.limit(window))


class RunCount:
    """Counts passes, rows and lens readings of a run by the rules of `engine.loop`, without running one.

    Exact without drafts, if no request is preempted; else for drafts of which this part of the tokens is accepted.
    """

    def __init__(
        self, plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState], accepted: float
    ) -> None:
        self.plan, self.drafter, self._accepted = plan, drafter, accepted
        self.passes: Counter[tuple[str, int]] = Counter()
        """By phase and token slots, pads and dummies included: number of passes; "draft": calls without a pass."""
        self.rows = self.readings = self.num_drafted = 0
        self._kept_rows = self._pattern_weights = self._step = 0
        self._draft_layers = plan.model.n_layers if drafter is None else drafted_layers(drafter, plan.model)
        length, window = plan.config.draft_length, plan.config.window
        cap = min(FIRST_DRAFT_LENGTH, window - 1) if isinstance(length, str) else length
        waiting = deque(sorted(states, key=lambda state: state.request.arrival_step))
        running: list[_Counted] = []
        while waiting or running:
            admitted = []
            while waiting and len(running) < min(len(states), plan.config.max_batch):
                if running and waiting[0].request.arrival_step > self._step:
                    break
                state = waiting.popleft()
                admitted.append(_Counted(state, state.num_left, cap))
                running.append(admitted[-1])
            self._prefill(admitted, [one for one in running if one not in admitted])
            running = [one for one in running if one.left]
            fill_ins = self._decode(running)
            self._verify(running, fill_ins)
            running = [one for one in running if one.left]

    def passes_of(self, phase: str) -> int:
        """Returns the number of passes of a phase."""
        return sum(count for (one, _), count in self.passes.items() if one == phase)

    @property
    def num_tiles(self) -> int:
        """Number of tiles of states that the lens reads."""
        return math.ceil(self.readings / LENS_TILE)

    @property
    def state_bytes(self) -> float:
        """Bytes of the kept states and head activations."""
        plan, (heads, _) = self.plan, self.plan.model.head_shape
        patterns = self._pattern_weights * heads * len(plan.layers) * state_dtype(plan.model, plan.capture).itemsize
        return self._kept_rows * state_bytes(plan.model, plan.capture, plan.layers) + patterns

    def _pass(self, phase: str, slots: int) -> None:
        """Counts a step."""
        self.passes[phase, slots] += 1
        self._step += 1

    def _add(self, one: _Counted, phase: str, start: int, count: int, num_drafted: int = 0, layers: int = -1) -> int:
        """Counts the rows of a request in a pass, the last `num_drafted` of which are fed draft tokens. layers: those
        that run; -1 for all. Returns the number of readings."""
        capture, length = self.plan.capture, one.state.request.num_prompt_tokens
        num_layers = len(self.plan.layers) if layers < 0 else sum(layer < layers for layer in self.plan.layers)
        status = "superseded" if phase == "decode" and one.state.is_verified else "committed"
        self.rows += count
        readings = 0
        for position in range(start, start + count):
            is_draft = position >= start + count - num_drafted
            if capture.keeps_row(phase, position) and (is_draft or capture.keeps_status(status)):
                self._kept_rows += 1
                self._pattern_weights += position + 1 if "pattern" in capture.heads else 0
                readings += num_layers * capture.reads_row(position, length)
        self.readings += readings
        return readings

    def _prefill(self, admitted: Sequence[_Counted], running: Sequence[_Counted]) -> None:
        """Counts the passes that read prompts; a prompt that another request has read is copied."""
        plan, config = self.plan, self.plan.config
        sources = {_prompt_key(one.state) for one in running}
        leaders: list[_Counted] = []
        for one in admitted:
            one.left -= 1
            key, cached = _prompt_key(one.state), one.state.request.num_cached
            if key not in sources:
                leaders.append(one)
                self._add(one, "prefill", cached, one.last - cached)
            else:
                self._step += 1
                kept, weights = self._kept_rows, self._pattern_weights
                self._add(one, "prefill", 0, one.last)
                self._kept_rows, self._pattern_weights = kept, weights  # copied rows refer to stored states
            sources.add(key)
        for is_fixed in (True, False):
            group = [one.state.request for one in leaders if one.state.reads_in_chunks == is_fixed]
            at_once = config.prefill_group if is_fixed and not plan.checker.batches_prompts else max(len(group), 1)
            chunk = config.prefill_chunk if is_fixed else FREE_PREFILL_WIDTH
            for i in range(0, len(group), at_once):
                done = {r.request_id: r.num_cached for r in group[i : i + at_once]}
                lengths = {r.request_id: r.num_prompt_tokens for r in group[i : i + at_once]}
                while unread := {name: start for name, start in done.items() if start < lengths[name]}:
                    sizes = {name: min(chunk, lengths[name] - start) for name, start in unread.items()}
                    taken = list(unread)
                    if is_fixed and plan.checker.batches_prompts:
                        chosen = pick_prompts([(sizes[name], unread[name]) for name in taken], config.capacity)
                        taken = [taken[number] for number in chosen]
                    width = chunk if is_fixed and config.pad_prefill else max(sizes[name] for name in taken)
                    is_grouped = is_fixed and not plan.checker.batches_prompts
                    self._pass("prefill", width * (config.prefill_group if is_grouped else len(taken)))
                    done |= {name: unread[name] + sizes[name] for name in taken}

    def _decode(self, running: Sequence[_Counted]) -> list[_Counted]:
        """Counts a decode pass, or a call of the drafter. Returns the requests that fill the next verify pass."""
        config, drafter = self.plan.config, self.drafter
        drafting = [one for one in running if not one.is_ready(config.window)]
        num_ready = len(running) - len(drafting)
        plain = [one for one in drafting if not one.state.is_verified]
        fill_ins = plain[: -num_ready % config.group] if config.window == 1 else []
        if drafting := [one for one in drafting if one not in fill_ins]:
            self._pass("decode" if self._draft_layers else "draft", len(drafting))
        for one in drafting:
            if not one.state.is_verified:
                self._add(one, "decode", one.last, 1)
                one.left -= 1
                continue
            made = 1
            if self._draft_layers:
                layers = -1 if drafter is None else self._draft_layers
                self._add(one, "decode", one.last + one.draft, 1, int(one.draft > 0), layers)
            else:
                made = 0 if one.draft else min(getattr(drafter, "length", None) or config.window, config.window)
            before, limit = one.draft, one.limit(config.window)
            one.draft, one.is_closed = min(before + made, limit), made == 0
            self.num_drafted += one.draft - before
        return fill_ins

    def _verify(self, running: Sequence[_Counted], fill_ins: Sequence[_Counted]) -> None:
        """Counts the verify passes of a round, and what they commit."""
        config, plan = self.plan.config, self.plan
        ready = [one for one in running if one.is_ready(config.window) or one in fill_ins]
        are_others_coming = any(one.state.is_verified and not one.is_ready(config.window) for one in running)
        for group in (ready[i : i + config.group] for i in range(0, len(ready), config.group)):
            if len(group) < config.group and are_others_coming:
                continue
            longest = 1 + max(one.draft for one in group)
            width = next((n for n in plan.checker.narrow_widths if n >= longest), config.window)
            self._pass("verify", width * (len(group) if config.is_invariant else config.group))
            for one in group:
                self._add(one, "verify", one.last, 1 + one.draft, one.draft)
                one.accepted += one.draft * self._accepted
                num_accepted = min(one.draft, math.floor(one.accepted + 1e-9))
                one.accepted -= num_accepted
                if one.cap is not None and config.draft_length == "adaptive" and one.draft:
                    is_whole = num_accepted == one.draft
                    one.cap = min(one.cap + 2, config.window - 1) if is_whole else max(one.cap - 1, 1)
                one.left -= 1 + num_accepted
                one.draft, one.is_closed = 0, False


def _prompt_key(state: SequenceState) -> tuple[object, ...]:
    """Returns a key that is equal for requests that share a prompt."""
    return state.request.prompt_token_ids, state.reads_in_chunks, state.request_id if state.is_edited else -1


# -- time


@dataclass
class StepTimes(Observer):
    """Measures the steps of short runs, and says how long the steps of the whole run take."""

    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By phase: (token slots, seconds) of each step."""
    num_drafted: int = 0
    num_accepted: int = 0
    tile_seconds: float = 0.0
    """Time in which the lens reads a tile."""
    last: float = 0.0

    def on_step(self, record: StepRecord) -> None:
        """Stores the seconds since the last step."""
        now = time.perf_counter()
        batch, width = record.batch_shape or (0, 0)
        phase, slots = (record.phase, batch * width) if batch else ("draft", len(record.request_ids))
        self.points.setdefault(phase, []).append((slots, now - self.last))
        self.num_drafted += sum(len(verdict.draft_token_ids) for verdict in record.verdicts)
        self.num_accepted += sum(verdict.num_accepted for verdict in record.verdicts)
        self.last = time.perf_counter()

    @property
    def acceptance(self) -> float | None:
        """Part of the draft tokens that were accepted; None if there was none."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    def seconds_of(self, count: RunCount) -> float:
        """Returns the seconds of a run with these passes: on the line through the measured ones of the phase."""
        _, per_slot = _line(self.points["prefill"], 0.0)
        total = count.num_tiles * self.tile_seconds
        for (phase, slots), number in count.passes.items():
            fixed, slope = _line(self.points.get(phase) or self.points["prefill"], per_slot)
            total += number * (fixed + slope * slots)
        return total


def _line(points: Sequence[tuple[int, float]], slope: float) -> tuple[float, float]:
    """Returns (seconds without a slot, seconds of a slot) of the line through the smallest and the largest pass.
    slope: of a slot, if all passes have one size."""
    small, large = min(points), max(points)
    if small[0] < large[0]:
        slope = max((large[1] - small[1]) / (large[0] - small[0]), 0.0)
    return max(large[1] - slope * large[0], 0.0), slope


def time_short_runs(
    plan: RunPlan, drafter: Drafter | None, states: Sequence[SequenceState], whole: RunCount
) -> StepTimes | None:
    """Runs one request, then up to MOST_REQUESTS, with short prompts and few new tokens, and discards the results.
    Returns the times of their steps; None if the run is less than TIMES_LONGER times as long."""
    spaced = states[:: -(-len(states) // MOST_REQUESTS)]
    most_new = 2
    if whole.num_drafted:
        most_new = max(3, min(plan.config.window + 1, whole.rows // (4 * TIMES_LONGER * MOST_REQUESTS)))
    runs = [[_shortened(state, most_new) for state in chosen] for chosen in (states[:1], spaced)]
    own = drafter if drafter is None or is_own(drafter) else None
    counts = [RunCount(plan, own, short, 1.0) for short in runs]
    if _work(whole) < TIMES_LONGER * (_work(counts[0], has_readings=False) + _work(counts[1])):
        return None
    unedited = copy(plan)
    unedited.editor = None
    times = StepTimes()
    for short, count in zip(runs, counts, strict=True):
        prompts = {state.request_id: state.request.prompt_token_ids for state in short}
        recorder = Recorder(plan.model, plan.recorded_capture, plan.layers, plan.lens, prompts)
        with hold_model(plan.model), unedited.hooks(recorder):
            times.last = time.perf_counter()
            for _ in unedited.bind_loop(own)(short, Tee(recorder, times)):
                pass
            began = time.perf_counter()
            if short is runs[-1] and count.readings:
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
        forced_token_ids=(),
        arrival_step=0,
    )
    return SequenceState(short, state.is_verified, sampling, state.decode, state.is_invariant)


def _work(count: RunCount, has_readings: bool = True) -> float:
    """Returns about how long a run takes, in computed rows. has_readings: include those of the lens."""
    model = count.plan.model
    tile_rows = LENS_TILE * model.d_vocab / (12 * model.n_layers * model.d_model)  # products of as many weights
    return count.rows + PASS_ROWS * sum(count.passes.values()) + count.num_tiles * tile_rows * has_readings
