"""Measures passes, lens tiles and token choices of a run on this machine. Nothing of them is recorded.

A pass runs through the engine's ModelRunner and the run's own Recorder, which then discards the pass as if it had
failed. The cache is the run's in size, and holds zeros where earlier tokens would be.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch

from cacheprobe.engine.committer import choose_next, describe, top_choices
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.drafters.early_exit import EarlyExit
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.engine.estimates.tally import PassShape, PassSums, RunTally, new_tokens
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import Entry, Pass
from cacheprobe.engine.plan import RunPlan
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.paths import choose_path
from cacheprobe.models.settings import hold_model
from cacheprobe.trace.recording.lens_reader import LENS_TILE, LensReader, Queued
from cacheprobe.trace.recording.recorder import Recorder

MOST_SHAPES = 4
"""Shapes of one kind of pass that are measured; those of other sizes are interpolated."""
LONG_SECONDS = 0.5
"""A call that takes longer at first is repeated only once."""
REPEATS = 5
TOKENS_CHOSEN = 8
"""Tokens of a pass whose choice is measured together."""


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the median time of a call in seconds, without its first time, which allocates; of a slow call, the second
    time."""
    taken: list[float] = []
    for number in range(REPEATS + 1):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
        if number and taken[0] > LONG_SECONDS:
            break
    return median(taken[1:])


# -- passes


def measure_passes(
    plan: RunPlan, states: Sequence[SequenceState], passes: Mapping[PassShape, PassSums], in_flight: int
) -> dict[PassShape, float]:
    """Returns the seconds of one pass of the most frequent, the smallest and the largest shapes, MOST_SHAPES of each
    kind (`_kind`).

    states: of the plan's requests, fresh.  passes: the run's, from a RunTally.  in_flight: requests with a cache row.
    """
    prompts = {r.request_id: r.prompt_token_ids for r in plan.requests}
    measured: dict[PassShape, float] = {}
    cache = plan.model.new_cache(in_flight + 1, plan.config.capacity)
    placed = sorted(states, key=lambda state: -state.request.num_prompt_tokens)[:in_flight]
    for state in placed:
        state.admit(cache)
        cache.prompt_lengths[state.cache_row] = state.request.num_prompt_tokens
        # for the copy in a pass's unused place (checker.py): tokens up to any position, and no earlier results of them
        state.is_verified, text = False, state.request.prompt_token_ids
        state.token_ids = [text[i % len(text)] for i in range(plan.config.capacity)]
    recorder = Recorder(plan.model, plan.capture, plan.layers, plan.lens, prompts)
    runner = ModelRunner(plan.model, cache, recorder, plan.checker)
    with hold_model(plan.model), plan.hooks(recorder):
        for shape in _chosen(passes):
            call = partial(_run_pass, runner, recorder, placed, shape, passes[shape])
            measured[shape] = seconds_of(call)
    for state in placed:
        del state.token_ids[state.request.num_prompt_tokens :]
    return measured


def _run_pass(
    runner: ModelRunner, recorder: Recorder, states: Sequence[SequenceState], shape: PassShape, sums: PassSums
) -> None:
    """Runs one pass at the mean position and with the mean number of real tokens of its shape, and discards it."""
    mean_rows = sums.rows / (sums.count * shape.num_entries)
    length = min(max(round(mean_rows), 1), shape.width)
    start = min(round(sums.start / sums.count), runner.cache.capacity - shape.width)
    entries = []
    for state in sorted(states[: shape.num_entries], key=lambda state: state.cache_row):
        text = state.request.prompt_token_ids
        token_ids = tuple(text[(start + i) % len(text)] for i in range(length))
        # as draft tokens, whose rows get no role: the recorder knows no other token at these positions
        entries.append(Entry(state, token_ids, start, shape.phase != "decode", len(token_ids)))
    slots, end = None, length if shape.is_without_pads else shape.width
    if shape.num_logits < shape.width:
        slots = range(max(end - shape.num_logits, 0), max(end, shape.num_logits))
    a_pass = Pass(runner.cache, runner.next_step(), shape.phase, entries, shape.width, shape.batch, shape.num_layers)
    a_pass.logit_slots, a_pass.is_without_pads = slots, shape.is_without_pads
    runner.run(a_pass)
    recorder.on_failure(runner.step)


def _kind(shape: PassShape) -> tuple[object, ...]:
    """Returns what two shapes must share so that the time of one says something about the other: all but sizes."""
    return shape.phase, shape.batch is None, shape.num_layers, shape.num_logits == shape.width


def _chosen(passes: Mapping[PassShape, PassSums]) -> list[PassShape]:
    """Returns the shapes to measure: of each kind the smallest, the largest, and those with the most tokens in all."""
    kinds: dict[tuple[object, ...], list[PassShape]] = {}
    for shape in sorted(passes, key=_size):
        kinds.setdefault(_kind(shape), []).append(shape)
    chosen = []
    for shapes in kinds.values():
        by_weight = sorted(shapes, key=lambda shape: -passes[shape].count * _size(shape))
        chosen += list(dict.fromkeys([shapes[0], shapes[-1], *by_weight]))[:MOST_SHAPES]
    return chosen


def _size(shape: PassShape) -> int:
    """Returns the number of token slots of a pass."""
    return shape.size * shape.width


def seconds_by_shape(
    passes: Mapping[PassShape, PassSums], measured: Mapping[PassShape, float]
) -> dict[PassShape, float]:
    """Returns the seconds of one pass of each shape: measured, or interpolated by the number of token slots between
    measured shapes of the same kind."""
    found = {}
    for shape in passes:
        alike = sorted((_size(one), seconds) for one, seconds in measured.items() if _kind(one) == _kind(shape))
        if not alike:  # a kind that only occurs if drafts are rejected
            alike = sorted((_size(one), seconds) for one, seconds in measured.items() if one.phase == shape.phase)
        sizes, seconds = zip(*alike, strict=True)
        found[shape] = measured.get(shape, float(np.interp(_size(shape), sizes, seconds)))
    return found


# -- what else takes time


def tile_seconds(plan: RunPlan) -> float:
    """Returns the seconds in which the run's lens reads one tile of random states."""
    draw = torch.Generator().manual_seed(0)
    model, num_layers = plan.model, len(plan.layers)
    rows = -(-LENS_TILE // num_layers)
    states = torch.randn(rows, num_layers, model.d_model, generator=draw).to(model.device, model.dtype)
    layers = torch.tensor(plan.layers)

    def read() -> None:
        """Queues states until a tile is full and read."""
        reader = LensReader(model, plan.lens, plan.capture.top_k)
        for row in range(rows):
            reader.queue_resolved(Queued(row, row, states[row], layers, target=0, request_id=0, step=0))

    with hold_model(model):
        return seconds_of(read)


def choice_seconds(plan: RunPlan, states: Sequence[SequenceState]) -> float:
    """Returns the seconds of choosing one token from random logits by the settings of the first request."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS_CHOSEN, plan.model.d_vocab, generator=draw).to(plan.model.device, plan.model.dtype)
    state = states[0]
    position = state.last_committed_position + 1

    def choose() -> None:
        """Chooses tokens and their log-probabilities, as after a pass."""
        for row, top_choice in zip(logits, top_choices(plan.model, logits), strict=True):
            describe(choose_next(state, row, (), position, top_choice), row, top_choice)

    return seconds_of(choose) / TOKENS_CHOSEN


def draft_seconds(plan: RunPlan, drafter: Drafter | None, tally: RunTally) -> float:
    """Returns the seconds that the drafter itself takes in the run: the passes of a DraftModel, the lens of an
    EarlyExit; 0 for other drafters."""
    calls = {batch: count for batch, count in tally.draft_calls.items() if batch}
    if not calls:
        return 0.0
    batch = max(calls)
    if isinstance(drafter, EarlyExit):
        draw = torch.Generator().manual_seed(0)
        states = torch.randn(batch, plan.model.d_model, generator=draw).to(plan.model.device, plan.model.dtype)
        layers = torch.full((batch,), drafter.layer, device=states.device)
        with hold_model(plan.model):
            one = seconds_of(lambda: drafter.lens.logits(plan.model, states, layers))
    elif isinstance(drafter, DraftModel):
        model, _ = choose_path(drafter.model)
        longest = min(max(r.num_prompt_tokens + new_tokens(r) for r in plan.requests), model.n_ctx - 1)
        cache = model.new_cache(batch, longest + 1)
        token_ids, rows, starts = torch.zeros(batch, 1, dtype=torch.long), range(batch), [longest // 2] * batch
        with hold_model(plan.model), torch.inference_mode():
            one = seconds_of(lambda: model.forward(token_ids, cache, list(rows), starts))
    else:
        return 0.0
    return one * sum(count * seen / batch for seen, count in calls.items())
