"""Runs the slow reference (`cp.reference`): each request alone, one token a pass, without a drafter."""

from collections.abc import Generator, Sequence

from cacheprobe.core.config import EngineConfig
from cacheprobe.core.records import Observer
from cacheprobe.edits.interventions.editor import Editor
from cacheprobe.engine.model_runner import EngineError, ModelRunner
from cacheprobe.engine.step import Engine
from cacheprobe.engine.watch import Watch
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.kvcache.surgery import KVSnapshot, take_snapshot
from cacheprobe.models.base import CachedLM


def read_rows(
    model: CachedLM, state: SequenceState, config: EngineConfig, observer: Observer, editor: Editor | None = None
) -> KVSnapshot:
    """Returns a KVSnapshot of a prompt without its last token: keys and values as the slow reference (`cp.reference`)
    writes them. Admits the request `state` and commits its first token.

    Raises: EngineError if a prefill pass fails; ValueError for a prompt of one token, or a model whose cache holds more
    than keys and values.
    """
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
    narrow_widths: Sequence[int] = (),
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
        runner = ModelRunner(model, cache, observer, editor, watch)
        runner.step = last_step
        engine = Engine(runner, config, narrow_widths=narrow_widths)
        for attempt in engine.attempts([state]):
            with attempt as alone:
                engine.prefill.read(alone)
        while not state.is_ended:
            for attempt in engine.attempts([state]):
                with attempt as alone:
                    (engine.verify if state.is_verified else engine.decode)(alone)
            yield runner.step
        cache.check_integrity()
        state.leave_row()
        last_step = runner.step
    if all(state.error for state in states):
        raise EngineError(states[0].error)
