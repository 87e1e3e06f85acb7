"""Verify passes outside the engine: which group serves on the processor that runs the tests, and one such pass."""

from collections.abc import Sequence

from torch import Tensor

from cacheprobe.core.config import EngineConfig
from cacheprobe.engine.shapes import serving_config
from cacheprobe.kvcache.cache import KVCache
from cacheprobe.kvcache.staged import PassAttention
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import choose_path
from cacheprobe.ops.attention import AttentionSpans, spans_of_pass, spans_of_positions

_TRIED = 16
"""Groups to try."""


def serving(model: CachedLM, window: int, *, at_least: int = 2, capacity: int = 96, path: str = "auto") -> int:
    """Returns the smallest group, of `at_least` requests or more, with which a verify pass of `window` serves.

    A test that needs one window for its subject asks here for the group. Which shapes compute every row alike differs
    between processors, and a shape that does not serve is refused.
    """
    chosen, _ = choose_path(model, path)
    for group in range(at_least, at_least + _TRIED):
        try:
            serving_config(chosen, EngineConfig(window=window, group=group, capacity=capacity, prefill_group=1))
        except ValueError:
            continue
        return group
    raise AssertionError(f"no group from {at_least} to {at_least + _TRIED - 1} serves with window={window}")


def fixed_pass(
    model: CachedLM,
    token_ids: Tensor,
    cache: KVCache,
    rows: Sequence[int],
    starts: Sequence[int],
    *,
    is_prefill: bool = False,
) -> Tensor:
    """Returns the logits of a forward whose attention the engine's fixed-shape passes would compute in the same way.

    A bare `model.forward` of a batch attends in one call for all requests. No bits are promised for it.
    """
    if not model.attends_by_request:
        return model.forward(token_ids, cache, rows, starts)
    pieces_of = spans_of_pass if is_prefill else spans_of_positions
    spans = AttentionSpans(tuple(pieces_of(start, token_ids.shape[1], cache.capacity) for start in starts))
    return model.forward(token_ids, cache, rows, starts, attention=PassAttention(spans=spans))
