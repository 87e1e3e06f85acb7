"""Estimates a run from its RunPlan: counts its passes, measures some of them here, and multiplies."""

import math
from collections.abc import Sequence

from cacheprobe.core.records import Request
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafters.calls import is_own
from cacheprobe.engine.drafters.early_exit import EarlyExit, FastPath
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.engine.estimates.assumed import ALL_ACCEPTED, ALL_REJECTED
from cacheprobe.engine.estimates.counting import count
from cacheprobe.engine.estimates.result import Bounds, Estimate, PassCost
from cacheprobe.engine.estimates.tables import TableCosts, sample_tables
from cacheprobe.engine.estimates.tally import RunTally, new_tokens
from cacheprobe.engine.estimates.timing import (
    choice_seconds,
    draft_seconds,
    measure_passes,
    seconds_by_shape,
    seconds_of,
    tile_seconds,
)
from cacheprobe.engine.estimates.trial import try_out
from cacheprobe.engine.plan import RunPlan
from cacheprobe.engine.sizes import READING_BYTES, TOKEN_BYTES, available_bytes, cache_slots, state_bytes, state_dtype
from cacheprobe.kvcache.recurrent import bytes_of_states
from cacheprobe.trace.recording.features import FeatureRecorder
from cacheprobe.trace.recording.lens_reader import LENS_TILE

TENSOR_HEADER_BYTES = 90
"""Bytes of one tensor's entry in the header of a safetensors file: name, dtype, shape and offsets as JSON."""

_FEATURE_BYTES = 12
"""Bytes of a feature during a run: its number and its activation."""


def estimate_plan(plan: RunPlan, drafter: Drafter | None) -> Estimate:
    """Returns the Estimate of a plan's run. Runs a few passes of the model, records none of them, and applies no
    intervention and no drafter of the user.

    Raises: ValueError for a Thinking States model, whose thoughts cost what their texts need, and for a run that needs
    more memory than is available.
    """
    if getattr(getattr(plan.model, "config", None), "thinks", False):
        raise ValueError(
            f"{plan.model.name} is a Thinking States model, whose run cannot be estimated: its time and its records "
            "depend on the thoughts that it writes; use the same model without thoughts, or run a part"
        )
    states = plan.states(drafter)
    least = likely = most = count(plan, drafter, states, ALL_ACCEPTED)
    outcomes: Sequence[tuple[int, int]] = ()
    if least.draft_tokens:
        most = count(plan, drafter, states, ALL_REJECTED)
        if drafter is None or is_own(drafter):
            outcomes = try_out(plan, drafter, plan.states(drafter))
        likely = count(plan, drafter, states, outcomes or ALL_ACCEPTED)
    tallies = (least, likely, most)
    tables = sample_tables(plan, drafter, states)
    in_flight = min(len(plan.requests), plan.config.max_batch)
    probe = plan.model.new_cache(1, 1)
    slot_bytes = probe.cache_bytes - bytes_of_states(probe, 1, 1)
    sizes = [_sizes(plan, tally, tables) for tally in tallies]
    needed = [plan.config.slots_needed(r.num_prompt_tokens, new_tokens(r)) for r in plan.requests]
    cache_bytes = slot_bytes * cache_slots(plan.config, needed, plan.model.device)
    cache_bytes += bytes_of_states(probe, in_flight + 1, plan.config.capacity, plan.config.prefill_chunk)
    kept_kv = sum(_num_positions(request) for request in plan.requests if request.keep_kv) * slot_bytes
    beside = cache_bytes + kept_kv + _draft_cache_bytes(plan, drafter, in_flight) + _logit_bytes(plan, least)
    seconds, costs = _seconds(plan, drafter, tallies, tables, in_flight)
    is_on_cpu = plan.model.device.type == "cpu"
    estimate = Estimate(
        num_requests=len(plan.requests),
        prompt_tokens=sum(request.num_prompt_tokens for request in plan.requests),
        new_tokens=sum(map(new_tokens, plan.requests)),
        prefill_passes=Bounds(*(tally.steps["prefill"] for tally in tallies)),
        decode_passes=Bounds(*(tally.steps["decode"] for tally in tallies)),
        verify_passes=Bounds(*(tally.steps["verify"] for tally in tallies)),
        rows=Bounds(*(tally.rows for tally in tallies)),
        cache_bytes=cache_bytes,
        state_bytes=Bounds(*(states for states, _, _, _ in sizes)),
        table_bytes=Bounds(*(held for _, held, _, _ in sizes)),
        disk_bytes=Bounds(*(saved for _, _, saved, _ in sizes)),
        peak_bytes=Bounds(*(beside + records for _, _, _, records in sizes)),
        available_bytes=available_bytes() if is_on_cpu else None,
        seconds=seconds,
        costs=costs,
        assumptions=_assumptions(plan, drafter, least, outcomes),
    )
    estimate.require_memory()
    return estimate


def _num_positions(request: Request) -> int:
    """Returns the number of positions of a request in the cache at its end: all but the newest token."""
    return request.num_prompt_tokens + new_tokens(request) - 1


# -- memory


def _sizes(plan: RunPlan, tally: RunTally, costs: TableCosts) -> tuple[float, float, float, float]:
    """Returns bytes of (states in the trace, tables in memory, the saved run, records at their largest)."""
    capture, model = plan.capture, plan.model
    states = tally.kept_rows * state_bytes(model, capture, plan.layers)
    heads, _ = model.head_shape
    patterns = tally.pattern_weights * heads * len(plan.layers) * state_dtype(model, capture).itemsize
    of_prompts = [token for request in plan.requests for token in request.prompt_token_ids]
    distinct = len(set(of_prompts)) / len(of_prompts)  # the new tokens repeat as often as those of the prompts
    lines = {
        "rows": tally.rows,
        "events": tally.event_lines,
        "ledger": tally.ledger_lines,
        "tokens": min(distinct * (len(of_prompts) + sum(map(new_tokens, plan.requests))), model.d_vocab),
        "manifest": sum(r.num_prompt_tokens + new_tokens(r) for r in plan.requests),
    }
    if capture.reads_lens:
        lines["hypotheses"] = tally.readings
    features = 0
    if (recorder := FeatureRecorder.of(plan.capture, plan.model)) is not None:
        lines["features"] = tally.feature_rows * recorder.most_active
        features = tally.feature_rows * recorder.count * _FEATURE_BYTES
    sites = (*capture.state_sites, *capture.heads)
    header = TENSOR_HEADER_BYTES * len(sites) * len(plan.layers)
    kept = states + patterns
    # one site's tensors exist twice while the passes of the run are joined
    joined = kept * (1 + 1 / len(sites)) if sites else 0
    records = joined + features + TOKEN_BYTES * tally.rows + READING_BYTES * tally.readings
    return kept, costs.memory_bytes(lines), kept + header + costs.disk_bytes(lines), records


def _draft_cache_bytes(plan: RunPlan, drafter: Drafter | None, in_flight: int) -> int:
    """Returns the bytes of a draft model's own cache; 0 for other drafters."""
    if not isinstance(drafter, DraftModel):
        return 0
    longest = max(_num_positions(request) for request in plan.requests)
    probe = drafter.model.new_cache(1, 1)
    slot_bytes = probe.cache_bytes - bytes_of_states(probe, 1, 1)
    return in_flight * longest * slot_bytes + bytes_of_states(probe, in_flight, longest)


def _logit_bytes(plan: RunPlan, tally: RunTally) -> int:
    """Returns the bytes of the largest logits: of a pass in the model's dtype, or of a lens tile, which has a float32
    copy."""
    model = plan.model
    of_passes = [shape.size * shape.num_logits for shape in tally.passes if shape.num_layers is None]
    of_pass = max(of_passes, default=0) * model.d_vocab * model.dtype.itemsize
    of_tile = LENS_TILE * model.d_vocab * (model.dtype.itemsize + 4) if plan.capture.reads_lens else 0
    return max(of_pass, of_tile)


# -- time


def _seconds(
    plan: RunPlan,
    drafter: Drafter | None,
    tallies: tuple[RunTally, RunTally, RunTally],
    costs: TableCosts,
    in_flight: int,
) -> tuple[Bounds, tuple[PassCost, ...]]:
    """Returns (the seconds of the run, the cost of each of its likely pass shapes).

    tallies: of the run with the fewest, the likely and the most passes.
    """
    least, likely, most = tallies
    states = plan.states(drafter)
    measured = measure_passes(plan, states, most.passes | least.passes | likely.passes, in_flight)
    tile = tile_seconds(plan) if plan.capture.reads_lens else 0.0
    choice = choice_seconds(plan, states)
    fingerprint = seconds_of(plan.fingerprint)
    totals = []
    for tally in tallies:
        by_shape = seconds_by_shape(tally.passes, measured)
        passes = sum(sums.count * by_shape[shape] for shape, sums in tally.passes.items())
        others = tally.seconds + tally.choices * choice + draft_seconds(plan, drafter, tally) + fingerprint
        reading = math.ceil(tally.readings / LENS_TILE) * tile + tally.readings * costs.reading_seconds
        totals.append(passes + others + reading + costs.build_seconds.of(tally.rows))
    by_shape = seconds_by_shape(likely.passes, measured)
    listed = tuple(
        PassCost(s.phase, s.size, s.width, s.num_layers, sums.count, by_shape[s], s in measured)
        for s, sums in likely.passes.items()
    )
    return Bounds(min(totals), totals[1], max(totals)), listed


def _assumptions(
    plan: RunPlan, drafter: Drafter | None, tally: RunTally, outcomes: Sequence[tuple[int, int]]
) -> tuple[str, ...]:
    """Returns what the estimate assumed, as texts. outcomes: from `try_out`; () if the drafter was not tried."""
    said = ["every request generates all its new tokens; a request that stops earlier takes less"]
    if tally.draft_tokens:
        drafted, accepted = (sum(length for length, _ in outcomes), sum(min(pair) for pair in outcomes))
        trial = f"as in a trial, where {accepted} of {drafted} were" if outcomes else "every one"
        said.append(f"accepted draft tokens: {trial}; in brackets, the numbers if every one is, and if none is")
        if not (drafter is None or isinstance(drafter, FastPath | DraftModel | EarlyExit)):
            said.append(f"the drafter {drafter.name} itself takes no time")
    if plan.capture.keep is not None:
        said.append("the predicate keep of CaptureConfig keeps every row")
    if plan.capture.statuses is not None and tally.draft_tokens:
        said.append("every draft token has a status to keep")
    if FeatureRecorder.of(plan.capture, plan.model) is not None:
        said.append("every row has as many active features as are recorded")
    if plan.interventions:
        said.append("interventions take no time")
    return tuple(said)
