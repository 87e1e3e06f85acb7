"""The main loop, on one screen: prefill, decode, verify, commit or roll back.

Without a drafter the fast path drafts for the deterministic requests, in one batch with the others, which commit as
they decode. With a drafter every request is verified.
"""

from collections.abc import Sequence

from cacheprobe.cache.kv import KVCache
from cacheprobe.cache.sequence import SequenceState
from cacheprobe.config import EngineConfig
from cacheprobe.drafters.base import Drafter
from cacheprobe.drafters.fast_path import FastPath
from cacheprobe.engine.passes import EngineError, PassRunner
from cacheprobe.engine.scheduler import Scheduler
from cacheprobe.engine.step import Stepper
from cacheprobe.models.base import CachedLM
from cacheprobe.records import Observer


def run_loop(
    model: CachedLM,
    states: Sequence[SequenceState],
    config: EngineConfig,
    observer: Observer,
    drafter: Drafter | None = None,
) -> None:
    """Run every request to its end. Tokens, states and verdicts leave through the observer.

    Raises: EngineError, before the failed pass has committed anything.
    Twin: cacheprobe.engine.reference.run_reference, == for tokens; bitwise for the states of deterministic requests.
    """
    stepper, scheduler = prepare(model, states, config, observer)
    drafter = drafter or FastPath()
    drafter.check(model)

    while not scheduler.is_done:
        if newcomers := scheduler.admit():
            stepper.prefill(newcomers)
        if growing := scheduler.growing():
            stepper.decode(drafter, growing)
        for group in scheduler.ready_groups():
            stepper.verify(group)
        scheduler.retire()

    stepper.cache.check_integrity()


def prepare(
    model: CachedLM, states: Sequence[SequenceState], config: EngineConfig, observer: Observer
) -> tuple[Stepper, Scheduler]:
    """A cache with a row for each request in flight and scratch rows for dummies, and those who use it."""
    if not states:
        raise EngineError("there is no request to run")
    in_flight = min(len(states), config.max_batch)
    cache: KVCache = model.new_cache(in_flight + config.group, config.capacity)
    scratch = range(in_flight, in_flight + config.group)
    return Stepper(PassRunner(model, cache, scratch, observer), config), Scheduler(states, cache, config, in_flight)
