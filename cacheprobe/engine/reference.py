"""Runs the slow reference: each request alone, one verify pass per token, no fast path and no drafter.

Slow on purpose. What the loop commits must equal what this commits.
"""

from collections.abc import Generator, Sequence

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Observer
from cacheprobe.engine.model_runner import EngineError, ModelRunner
from cacheprobe.engine.step import Engine
from cacheprobe.engine.watch import Watch
from cacheprobe.interventions.editor import Editor
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.surgery import KVSnapshot, take_snapshot
from cacheprobe.models.base import CachedLM


def read_rows(
    model: CachedLM, state: SequenceState, config: EngineConfig, observer: Observer, editor: Editor | None = None
) -> KVSnapshot:
    """Returns the keys and values of a prompt without its last token, as the reference's prefill writes them."""
    cache = model.new_cache(2, config.capacity)
    state.admit(cache)
    engine = Engine(ModelRunner(model, cache, observer, editor), config)
    for attempt in engine.attempts([state]):
        with attempt as alone:
            engine.prefill.read(alone)
    if state.error:
        raise EngineError(state.error)
    return take_snapshot(cache, state.cache_row, state.request.prompt_token_ids[:-1])


def run_reference(
    model: CachedLM,
    states: Sequence[SequenceState],
    config: EngineConfig,
    observer: Observer,
    editor: Editor | None = None,
    watch: Watch | None = None,
) -> Generator[int, None, None]:
    """Runs each request by itself on a fresh cache: prefill in fixed chunks, then verify passes with empty drafts.

    Yields the step after each token.

    Source: LLM-42 (arXiv 2601.17768): the declared reference is the verifier's schedule, not batch-1 decoding.
    """
    first_step = -1
    for state in states:
        cache = model.new_cache(2, config.capacity)
        state.admit(cache)
        passes = ModelRunner(model, cache, observer, editor, watch)
        passes.step = first_step
        engine = Engine(passes, config)
        for attempt in engine.attempts([state]):
            with attempt as alone:
                engine.prefill.read(alone)
        while not state.is_ended:
            for attempt in engine.attempts([state]):
                with attempt as alone:
                    engine.verify(alone)
            yield passes.step
        cache.check_integrity()
        state.leave_row()
        first_step = passes.step
    if all(state.error for state in states):
        raise EngineError(states[0].error)
