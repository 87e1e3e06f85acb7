"""Our attention behind transformers' attention interface, and the same for forwards without modules.

A pass of which bits are promised attends request by request, any other in one call: the cache's reach says which.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from cacheprobe.kvcache.cache import KVCache
from cacheprobe.models.base import ModelError
from cacheprobe.ops.attention.by_request import Reach, attend_by_request, attend_together

ATTENTION = "cacheprobe"
"""Our name in transformers' table of attention functions."""

_UNKNOWN_TERMS = ("s_aux", "sinks", "position_bias", "cache", "head_mask")
"""What some architectures add to the scores, and this attention does not."""


class _Calls:
    """The reach of the forward at hand, and how many layers have attended in it."""

    def __init__(self, reach: Reach | None) -> None:
        self.reach, self.count = reach, 0


_calls: ContextVar[_Calls | None] = ContextVar("cacheprobe_attention", default=None)


def can_attend_here(model_class: type[Any]) -> bool:
    """Whether transformers' class looks its attention up in the table."""
    return bool(getattr(model_class, "_supports_attention_backend", False))


@contextmanager
def attending(reach: Reach | None, num_layers: int) -> Iterator[None]:
    """For one forward of a transformers model: how its layers attend.

    Raises: ModelError where another number of layers than `num_layers` attended here, so that some of them computed
        all requests in one call.
    """
    calls = _Calls(reach)
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)
    if reach is not None and calls.count != num_layers:
        raise ModelError(
            f"{calls.count} of {num_layers} layers used the attention that was set, so the others may give a request "
            "other bits in another batch; use path='bridge'"
        )


def attend_over_cache(
    cache: KVCache, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """[b, t, h * d] of new queries [b, h, t, d]; new keys and values [b, g, t, d] are stored first."""
    if cache.reach is None:
        keys, values = cache.write(layer, k, v)
        return attend_together(q, keys, values, mask, scale)
    cache.store(layer, k, v)
    return attend_by_request(q, partial(cache.row_view, layer), mask, cache.reach, scale)


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """See transformers.AttentionInterface: queries [b, h, t, d], keys and values [b, g, s, d] -> [b, t, h, d]."""
    if unknown := [name for name in _UNKNOWN_TERMS if others.get(name) is not None]:
        raise ModelError(f"{type(module).__name__} attends with {unknown[0]}, which is not computed here")
    if attention_mask is None:
        raise ModelError(f"{type(module).__name__} attends without a mask")
    calls = _calls.get()
    if calls is None or calls.reach is None:
        out = attend_together(query, key, value, attention_mask, scaling, softcap)
    else:

        def held(row: int, span: int) -> tuple[Tensor, Tensor]:
            return key[row : row + 1, :, :span], value[row : row + 1, :, :span]

        out = attend_by_request(query, held, attention_mask, calls.reach, scaling, softcap)
    if calls is not None:
        calls.count += 1
    return out.unflatten(-1, (query.shape[1], -1)), None


AttentionInterface.register(ATTENTION, _interface)
