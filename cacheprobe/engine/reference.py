"""The oracle: the verifier's own output, one request alone, one token at a time.

It runs the same fixed-shape verify pass as the loop, and has no drafter, no fast path, no batch and no scheduler. What
the loop commits for a deterministic request must equal it bit for bit.
"""

from collections.abc import Sequence

from cacheprobe.cache.sequence import SequenceState
from cacheprobe.config import EngineConfig
from cacheprobe.engine.passes import PassRunner
from cacheprobe.engine.step import Stepper
from cacheprobe.models.base import CachedLM
from cacheprobe.records import Observer


def run_reference(model: CachedLM, states: Sequence[SequenceState], config: EngineConfig, observer: Observer) -> None:
    """Run each request by itself on a fresh cache: prefill in fixed chunks, then verify passes with empty drafts.

    Source: LLM-42 (arXiv 2601.17768): the declared reference is the verifier's schedule, not batch-1 decoding.
    """
    first_step = -1
    for state in states:
        cache = model.new_cache(1 + config.group, config.capacity)
        state.row = cache.allocate()
        passes = PassRunner(model, cache, range(1, 1 + config.group), observer)
        passes.step = first_step
        stepper = Stepper(passes, config)
        stepper.prefill([state])
        while not state.finish:
            stepper.verify([state])
        cache.check_integrity()
        first_step = passes.step
