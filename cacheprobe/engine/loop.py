"""Runs the main loop: prefill, decode, verify, then commit or roll back. Read this file first.

Without a drafter, decode passes commit the tokens of never verified requests, and draft for the verified ones if the
window is above 1. With a drafter every request is verified. With determinism="invariant" no other request is.
Memory: sizes.py says what happens when memory runs out (refusal, preemption at max_kv_tokens, failed passes).
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Observer
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.engine.drafters.base import Drafter
from cacheprobe.engine.model_runner import EngineError, ModelRunner
from cacheprobe.engine.scheduler import Scheduler
from cacheprobe.engine.step import Engine
from cacheprobe.engine.watch import Watch
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import is_checking
from cacheprobe.models.base import CachedLM

FIRST_DRAFT_LENGTH = 4
"""Draft tokens that a request may have at first if draft_length is "adaptive"."""


def rounds(
    model: CachedLM,
    states: Sequence[SequenceState],
    config: EngineConfig,
    observer: Observer,
    drafter: Drafter | None = None,
    editor: Editor | None = None,
    watch: Watch | None = None,
    make_runner: Callable[..., ModelRunner] = ModelRunner,
    cache: KVCache | None = None,
    narrow_widths: Sequence[int] = (),
    batches_prompts: bool = False,
) -> Generator[int, None, None]:
    """Runs the main loop. Yields the number of the last step after each round, until every request has ended.

    Requests may be cancelled between rounds. editor: applies interventions; its hooks must be on the model already.
    watch: computes tokens of some passes twice and compares them.
    make_runner, cache: for an estimate, which counts the passes instead and needs no keys and values. By default the
        passes run, over a cache that is allocated here.
    narrow_widths: widths below the window that a verify pass of short drafts may have.
    batches_prompts: prompts of verified and invariant requests may share a pass.

    A request whose passes fail, also without its draft, ends with an error; the others go on. Raises: EngineError if
    there is no request or all failed; ValueError if the drafter refuses the model; CacheIntegrityError at the end if
    the cache is at fault.
    Twin: cacheprobe.engine.reference.run_reference, == for tokens; bitwise for the states of deterministic requests.
    """
    engine, scheduler = prepare(
        model, states, config, observer, drafter, editor, watch, make_runner, cache, narrow_widths, batches_prompts
    )
    if drafter is not None:
        drafter.check(model)
    decode = engine.decode if drafter is None else engine.draft
    with closing(engine.drafter_calls) as calls:
        while not scheduler.is_done:
            for state in scheduler.cancelled():
                engine.committer.stop(state, "cancelled")
            for state in scheduler.retire():  # so that no other request is preempted for them
                calls.release(state)
            for state in scheduler.to_preempt():
                engine.committer.preempt(state)
                calls.release(state)
            admitted = scheduler.admit(engine.runner.step + 1)
            for prefill, group in engine.prefills(admitted, scheduler.running):
                for attempt in engine.attempts(group):
                    with attempt as requests:
                        prefill(requests)
            piggybacked = scheduler.piggybacked()
            if drafting := [state for state in scheduler.drafting() if state not in piggybacked]:
                for attempt in engine.attempts(drafting):
                    with attempt as requests:
                        decode(requests)
            for group in scheduler.ready_groups(piggybacked):
                for attempt in engine.attempts(group):
                    with attempt as requests:
                        engine.verify(requests)
            for state in scheduler.retire():
                calls.release(state)
            if is_checking():
                for state in states:
                    state.check()
            yield engine.runner.step

    engine.cache.check_integrity()
    if all(state.error for state in states):
        raise EngineError(states[0].error)


def prepare(
    model: CachedLM,
    states: Sequence[SequenceState],
    config: EngineConfig,
    observer: Observer,
    drafter: Drafter | None = None,
    editor: Editor | None = None,
    watch: Watch | None = None,
    make_runner: Callable[..., ModelRunner] = ModelRunner,
    cache: KVCache | None = None,
    narrow_widths: Sequence[int] = (),
    batches_prompts: bool = False,
) -> tuple[Engine, Scheduler]:
    """Returns (Engine, Scheduler) for these requests. A new cache (unless one is given) has one row for each request in
    flight and a spare one.

    Sets the field draft_cap of each request. Raises: EngineError without a request.
    """
    if not states:
        raise EngineError("there is no request to run")
    in_flight = min(len(states), config.max_batch)
    cache = model.new_cache(in_flight + 1, config.capacity) if cache is None else cache
    for state in states:
        length = config.draft_length
        state.draft_cap = min(FIRST_DRAFT_LENGTH, config.window - 1) if isinstance(length, str) else length
    engine = Engine(make_runner(model, cache, observer, editor, watch), config, drafter, narrow_widths, batches_prompts)
    return engine, Scheduler(states, cache, config, in_flight)
