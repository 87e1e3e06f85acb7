"""Runs the main loop: prefill, decode, verify, then commit or roll back. Read this file first. Below stands the slow
reference (`cp.reference`).

Without a drafter, decode passes commit the tokens of never verified requests, and draft for the verified ones if the
window is above 1. With a drafter every request is verified, unless it goes on as without one because drafts do not pay
(drafts/lengths.py). With determinism="invariant" no other request is verified.
Memory: sizes.py says what happens when memory runs out (refusal, preemption at max_kv_tokens, failed passes).
"""

from collections.abc import Callable, Generator, Sequence

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import DraftCosts, Observer
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.engine.checker import RecomputeChecker
from cacheprobe.engine.drafters.base import Drafter, release
from cacheprobe.engine.model_runner import ModelRunner
from cacheprobe.engine.passes import EngineError
from cacheprobe.engine.prefill import prefills
from cacheprobe.engine.scheduler import Scheduler
from cacheprobe.engine.step import Engine, RecordsHead
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.surgery import KVSnapshot, take_snapshot
from cacheprobe.models.base import CachedLM


def generation_loop(
    new_runner: Callable[[], ModelRunner],
    states: Sequence[SequenceState],
    config: EngineConfig,
    drafter: Drafter | None = None,
    costs: DraftCosts | None = None,
    head_passes: RecordsHead | None = None,
) -> Generator[int, None, None]:
    """Runs the main loop. Yields the number of the last step after each round, until every request has ended.

    Requests may be cancelled between rounds. new_runner: makes the ModelRunner at the first `next`; its cache needs a
    row for each request in flight and a spare one for dummies. costs: of drafts, which decide the adaptive length.
    head_passes: records the passes of the drafter's head.

    A request whose passes fail, also without its draft, ends with an error; the others go on. Raises: EngineError if
    there is no request or all failed; CacheIntegrityError at the end if the cache is at fault.
    Twin: run_reference, == for tokens; bitwise for the states of deterministic requests.
    """
    if not states:
        raise EngineError("there is no request to run")
    engine = Engine(new_runner(), config, drafter, costs, head_passes)
    scheduler = Scheduler(states, engine.cache, config)
    while not scheduler.is_done:
        for state in scheduler.cancelled():
            engine.committer.stop(state, "cancelled")
        for state in scheduler.retire():  # so that no other request is preempted for them
            release(drafter, state)
        for state in scheduler.to_preempt():
            engine.committer.preempt(state)
            release(drafter, state)
        admitted = scheduler.admit(engine.runner.step + 1)
        for prefill, group in prefills(engine.prefill, admitted, scheduler.running):
            for requests in engine.attempts(group):
                with engine.isolating():
                    prefill(requests)
        fill_ins = scheduler.fill_ins()
        for step, group in engine.decodes([state for state in scheduler.drafting() if state not in fill_ins]):
            for requests in engine.attempts(group):
                with engine.isolating():
                    step(requests)
        for group in scheduler.ready_groups(fill_ins):
            for requests in engine.attempts(engine.runner.checker.leaving_room(group, config)):
                with engine.isolating():
                    engine.verify(requests)
        for state in scheduler.retire():
            release(drafter, state)
        yield engine.runner.step

    engine.cache.check_integrity()
    if all(state.error for state in states):
        raise EngineError(states[0].error)


# -- the slow reference


def prefill_snapshot(
    model: CachedLM, state: SequenceState, config: EngineConfig, observer: Observer, editor: Editor | None = None
) -> KVSnapshot:
    """Returns a KVSnapshot of a prompt without its last token: keys and values as the slow reference (`cp.reference`)
    writes them. Admits the request `state` and commits its first token.

    Raises: EngineError if a prefill pass fails; ValueError for a prompt of one token, or a model whose cache holds more
    than keys and values.
    """
    cache = model.new_cache(2, config.capacity)
    state.admit(cache)
    engine = Engine(ModelRunner(model, cache, observer, RecomputeChecker(model), editor), config)
    for alone in engine.attempts([state]):
        with engine.isolating():
            engine.prefill.read(alone)
    if state.error:
        raise EngineError(state.error)
    return take_snapshot(cache, state.cache_row, state.request.prompt_token_ids[:-1])


def run_reference(
    model: CachedLM,
    states: Sequence[SequenceState],
    config: EngineConfig,
    observer: Observer,
    checker: RecomputeChecker,
    editor: Editor | None = None,
) -> Generator[int, None, None]:
    """Runs each request alone on a fresh cache. Yields the step number after every verify pass, which commits one token
    unless it fails.

    The prompt is read in fixed chunks; then verify passes run with empty drafts. A request that is not verified
    (determinism="invariant" without a drafter) runs decode passes instead.
    Raises: EngineError if all requests failed.

    Source: LLM-42 (arXiv 2601.17768): the declared reference is the verifier's schedule, not batch-1 decoding.
    """
    last_step = -1
    for state in states:
        cache = model.new_cache(2, config.capacity)
        state.admit(cache)
        runner = ModelRunner(model, cache, observer, checker, editor, last_step)
        engine = Engine(runner, config)
        for alone in engine.attempts([state]):
            with engine.isolating():
                engine.prefill.read(alone)
        while not state.is_ended:
            for alone in engine.attempts([state]):
                with engine.isolating():
                    (engine.verify if state.is_verified else engine.decode)(alone)
            yield runner.step
        cache.check_integrity()
        state.leave_row()
        last_step = runner.step
    if all(state.error for state in states):
        raise EngineError(states[0].error)
