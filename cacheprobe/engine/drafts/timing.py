"""Measures before a run what its passes and draft tokens cost on this machine, and keeps the result on the disk."""

import hashlib
import json
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace

from cacheprobe import __version__
from cacheprobe.core.config import CaptureConfig
from cacheprobe.core.files import write_json
from cacheprobe.core.records import MANY, DraftCosts, EngineError, Observer, Request, StepRecord
from cacheprobe.core.values import JsonDict
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.drafters.base import Drafter, always_drafts, drafted_layers, release
from cacheprobe.engine.drafters.scripted import Scripted
from cacheprobe.engine.loop import generation_loop
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.plan import RunPlan
from cacheprobe.engine.shapes import config_to_try
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.converted import cache_directory
from cacheprobe.models.settings import hold_model, numeric_settings, processor_name
from cacheprobe.trace.recording.observers import Tee
from cacheprobe.trace.recording.recorder import Recorder

_PROMPT_TOKENS, _PERIOD = 16, 4
"""Tokens of a text of the measurement, and after how many it repeats itself, so that n-grams draft."""
_NOTHING = CaptureConfig(None)
_DRAFT, _REPEATS = 4, 5
"""Tokens of a draft whose time is measured, at most, and how many passes of each kind are."""


class _Clock(Observer):
    """Measures each step with all that happens since the one before: choices, commits, the drafter. The prompts' rows
    and those of the first step are read by the lens before the second."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._last = recorder, time.perf_counter()
        self.steps: list[tuple[StepRecord, float]] = []
        self.tail_seconds = 0.0
        """Time in which the lens reads the rows that are left at the end."""

    def on_step(self, record: StepRecord) -> None:
        """Stores the seconds since the last step, unless it read a prompt."""
        now = time.perf_counter()
        if record.phase != "prefill":
            self.steps.append((record, now - self._last))
        if len(self.steps) < 2:
            self._recorder.take()
        self._last = time.perf_counter()

    def read_the_rest(self) -> None:
        """Lets the lens read the rows that it has not read yet, and sets `tail_seconds`."""
        began = time.perf_counter()
        self._recorder.take()
        self.tail_seconds = time.perf_counter() - began

    def of_phase(self, phase: str) -> list[tuple[StepRecord, float]]:
        """Returns (record, seconds) of the steps of a phase but the first, which allocates."""
        return [step for step in self.steps if step[0].phase == phase][1:]


def costs_of(plan: RunPlan, checker: RecomputeChecker) -> DraftCosts | None:
    """Returns the DraftCosts of a run: those in the cache folder, or else measured now and written there. None without
    a drafter, and with one that always drafts.

    checker: of the run, which has tried its shapes.
    Costs are kept for each model shape, dtype, processor, thread count, library version, pass shape, drafter, capture
    and kind of sampling.
    """
    drafter = plan.drafter
    if drafter is None or always_drafts(drafter):
        return None
    key = json.dumps(_key(plan, checker), sort_keys=True, default=str)
    path = cache_directory() / "draft-costs" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or a damaged one
        return DraftCosts.from_record(json.loads(path.read_text(encoding="utf-8")))
    print(f"measuring what drafts of {drafter.name} cost, once: some seconds", file=sys.stderr, flush=True)
    try:
        costs = measure(plan, checker, drafter)
    except EngineError:  # a drafter that fails also fails in the run, which says for which requests
        return None
    with suppress(OSError):  # a folder that cannot be written
        write_json(path, costs.record())
    return costs


def _key(plan: RunPlan, checker: RecomputeChecker) -> JsonDict:
    """Returns all that the costs depend on."""
    model, config, sampling = plan.model, plan.config, plan.sampling
    shape = (model.name, model.d_model, model.n_layers, model.d_vocab, model.head_shape, model.dtype, model.device)
    capacity = config_to_try(config, model.attends_by_request).capacity
    shapes = (config.window, config.group, capacity, config.determinism, config.acceptance)
    return {
        "model": (*shape, getattr(model, "path", "")),
        "machine": (processor_name(), numeric_settings(), __version__),
        "shapes": (*shapes, checker.narrow_widths),
        "drafter": repr(plan.drafter),
        "records": (plan.recorded_capture.record(), plan.layers, plan.lens.name),
        "sampling": (sampling.is_greedy, sampling.is_plain),
    }


def measure(plan: RunPlan, checker: RecomputeChecker, drafter: Drafter) -> DraftCosts:
    """Returns the DraftCosts of a run, from short runs of one request and of MANY on texts of their own."""
    window, widths = plan.config.window, (*checker.narrow_widths, plan.config.window)
    script = Scripted(lambda state: [0] * (widths[state.num_generated % len(widths)] - 1))
    plain, draft = [], []
    with hold_model(plan.model):
        for count in (1, MANY):
            steps = _timed(plan, checker, None, count, _REPEATS + 1).of_phase("decode")
            plain.append(min(seconds for _, seconds in steps))
            steps = _timed(plan, checker, drafter, count, 4 * _REPEATS, min(_DRAFT, window)).of_phase("decode")
            lengths = [(max(len(token_ids) for _, token_ids in record.proposed), spent) for record, spent in steps]
            tokens = [spent / length for length, spent in lengths if length]
            draft.append(min(tokens) if tokens else plain[-1])
        passes: dict[int, list[float]] = {}
        num_steps = 2 * len(widths) * _REPEATS + 2
        steps = _timed(plan, checker, script, min(plan.config.group, MANY), num_steps, window).of_phase("verify")
        for record, seconds in steps:
            passes.setdefault(record.batch_shape[1] if record.batch_shape else window, []).append(seconds)
        row = 0.0
        if plan.recorded_capture.keeps_states:
            recorded = _timed(plan, checker, None, MANY, _REPEATS + 1, capture=plan.recorded_capture)
            steps = recorded.of_phase("decode")
            seconds = sum(spent for _, spent in steps) + recorded.tail_seconds
            row = max(seconds / len(steps) - plain[1], 0.0) / MANY
    # a narrower pass takes no longer than a wider one; that it seems to is other load on the machine
    verify = {width: min(min(passes[wider]) for wider in passes if wider >= width) for width in sorted(passes)}
    share = drafted_layers(drafter, plan.model) / plan.model.n_layers
    return DraftCosts((plain[0], plain[1]), (draft[0], draft[1]), verify, row, share)


def _timed(
    plan: RunPlan,
    checker: RecomputeChecker,
    drafter: Drafter | None,
    count: int,
    num_steps: int,
    draft_length: int = 1,
    capture: CaptureConfig = _NOTHING,
) -> _Clock:
    """Runs this many requests until `num_steps` steps have followed their prompts. Returns the clock of these steps."""
    model = plan.model
    most = min(num_steps + 2, model.n_ctx // 2) * (1 if drafter is None else 2)
    config = config_to_try(plan.config, model.attends_by_request)
    room = replace(config, draft_length=draft_length).slots_needed(_PROMPT_TOKENS, most)
    config = replace(config, draft_length=draft_length, capacity=max(config.capacity, room), max_kv_tokens=None)
    sampling = replace(plan.sampling, max_new_tokens=most, stop=(), stop_token_ids=(), seed=0, n=1)
    states, length = [], min(_PROMPT_TOKENS, model.n_ctx // 2)
    for i in range(count):
        token_ids = tuple((_PERIOD * i + t % _PERIOD) % model.d_vocab for t in range(length))
        request = Request(token_ids, sampling, request_id=i, prompt_token_ids=token_ids)
        states.append(SequenceState(request, drafter is not None, sampling, model.decode))
    prompts = {state.request_id: state.request.prompt_token_ids for state in states}
    recorder = Recorder(model, capture, plan.layers, plan.lens, prompts)
    clock, own = _Clock(recorder), RecomputeChecker(model)
    own.narrow_widths = checker.narrow_widths

    def new_runner() -> ModelRunner:
        """Returns a ModelRunner with a new cache."""
        return ModelRunner(model, model.new_cache(count + 1, config.capacity), Tee(recorder, clock), own)

    with model.capturing(recorder.wanted(), own.listening(recorder.on_state)):
        with closing(generation_loop(new_runner, states, config, drafter)) as rounds:
            for _ in rounds:
                if len(clock.steps) >= num_steps:
                    break
    clock.read_the_rest()
    for state in states:
        release(drafter, state)
    return clock
