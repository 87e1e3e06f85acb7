"""Runs the main loop, on one screen: prefill, decode, verify, commit or roll back.

Without a drafter the fast path drafts for the deterministic requests, in one batch with the others, which commit as
they decode. With a drafter every request is verified.
"""

from collections.abc import Generator, Sequence
from contextlib import closing

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Observer
from cacheprobe.drafters.base import Drafter
from cacheprobe.engine.model_runner import EngineError, ModelRunner
from cacheprobe.engine.scheduler import Scheduler
from cacheprobe.engine.step import Engine
from cacheprobe.engine.watch import Watch
from cacheprobe.interventions.editor import Editor
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.status import is_checking
from cacheprobe.models.base import CachedLM

FIRST_DRAFT_LENGTH = 4
"""Candidates that the adaptive length starts from."""


def rounds(
    model: CachedLM,
    states: Sequence[SequenceState],
    config: EngineConfig,
    observer: Observer,
    drafter: Drafter | None = None,
    editor: Editor | None = None,
    watch: Watch | None = None,
) -> Generator[int, None, None]:
    """Runs the loop one round at a time, and yields the step number after each. Between rounds a request may be
    cancelled.

    editor: interventions, whose hooks are on the model already.  watch: compares verify passes with themselves.

    A request whose pass fails ends with an error, and the others go on. Raises: EngineError if every request failed.
    Twin: cacheprobe.engine.reference.run_reference, == for tokens; bitwise for the states of deterministic requests.
    """
    engine, scheduler = prepare(model, states, config, observer, drafter, editor, watch)
    if drafter is not None:
        drafter.check(model)
    decode = engine.decode if drafter is None else engine.draft
    with closing(engine.drafter_calls) as calls:
        while not scheduler.is_done:
            for state in scheduler.cancelled():
                engine.committer.stop(state, "cancelled")
            for state in scheduler.retire():  # before others have to give way for them
                calls.release(state)
            for state in scheduler.to_preempt():
                engine.committer.preempt(state)
                calls.release(state)
            admitted = scheduler.admit(engine.runner.step + 1)
            for prefill, group in engine.prefills(admitted, scheduler.running):
                for attempt in engine.attempts(group):
                    with attempt as some:
                        prefill(some)
            piggybacked = scheduler.piggybacked()
            if drafting := [state for state in scheduler.drafting() if state not in piggybacked]:
                for attempt in engine.attempts(drafting):
                    with attempt as some:
                        decode(some)
            for group in scheduler.ready_groups(piggybacked):
                for attempt in engine.attempts(group):
                    with attempt as some:
                        engine.verify(some)
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
) -> tuple[Engine, Scheduler]:
    """Allocates a cache with a place for each request in flight and one for all dummies; returns its engine and
    scheduler."""
    if not states:
        raise EngineError("there is no request to run")
    in_flight = min(len(states), config.max_batch)
    cache: KVCache = model.new_cache(in_flight + 1, config.capacity)
    for state in states:
        length = config.draft_length
        state.draft_cap = min(FIRST_DRAFT_LENGTH, config.window - 1) if isinstance(length, str) else length
    engine = Engine(ModelRunner(model, cache, observer, editor, watch), config, drafter)
    return engine, Scheduler(states, cache, config, in_flight)
