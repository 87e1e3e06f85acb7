"""Registers cacheprobe's attention with transformers, and offers the same attention to forwards that do not call
modules.

If the cache's `spans` is set, attention runs request by request, so that results are batch-invariant; otherwise the
whole batch runs in one call.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType

from torch import Tensor
from transformers import AttentionInterface

from cacheprobe.core.hook_names import PATTERN
from cacheprobe.core.live import LiveModule
from cacheprobe.kvcache.staged import StagedCache
from cacheprobe.models.base import ModelError
from cacheprobe.models.fast.tape import Tape
from cacheprobe.ops.attention import AttentionSpans, attend_by_request, attend_together, attention_pattern, first_slots

ATTENTION = "cacheprobe"
"""Our name in transformers' table of attention functions."""

_UNKNOWN_TERMS = ("sinks", "position_bias", "cache", "head_mask")
"""Terms that some architectures add to the scores and that this attention does not support."""


QUERY = "query"
"""Site of an attention's queries as they are given to the attention function. Its functions may return others."""

Attend = Callable[[int, Tensor, float | None], Tensor]
"""Function (layer, queries [b, h, t, d], scale) -> attention outputs [b, t, h * d] over the cache of the forward, to
which the layer has written its keys and values."""


OF_ATTENTION: Mapping[str, Callable[..., Tensor]] = {PATTERN: attention_pattern}
"""Sites that only the attention function sees -> function of its queries, keys and values by request, mask, spans,
scale, softcap and sinks that returns the site's tensor."""

AttentionListeners = Mapping[int, Mapping[str, Sequence[Callable[[Tensor], Tensor | None]]]]
"""Functions that take the tensors of OF_ATTENTION's sites and of QUERY: by id of the attention module, then by site."""


class _Calls:
    """Holds the `spans`, the `attend` and the listeners of the current forward, and the layers that have used
    cacheprobe's attention; DiffLlama's use it twice each."""

    def __init__(
        self, spans: AttentionSpans | None, attend: Attend | None, listeners: AttentionListeners, tape: Tape | None
    ) -> None:
        self.spans, self.attend, self.listeners, self.tape = spans, attend, listeners, tape
        self.layers = set[int]()


_calls: ContextVar[_Calls | None] = ContextVar("cacheprobe_attention", default=None)


@contextmanager
def attending(
    spans: AttentionSpans | None,
    num_layers: int,
    attend: Attend | None = None,
    listeners: AttentionListeners = MappingProxyType({}),
    tape: Tape | None = None,
) -> Iterator[None]:
    """Makes a transformers model that uses cacheprobe's attention attend as `spans` says, for one forward inside the
    `with`: request by request over the slots in `spans`, or the whole batch in one call if `spans` is None. If given,
    `attend` computes the attention instead, and `tape` records it.  listeners: see `AttentionListeners`.

    Raises: ModelError, if `spans` is given, unless exactly `num_layers` layers used this attention: other layers may
    have computed all requests in one call.
    """
    calls = _Calls(spans, attend, listeners, tape)
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)
    if spans is not None and len(calls.layers) != num_layers:
        raise ModelError(
            f"{len(calls.layers)} of {num_layers} layers used the attention that was set, so the others may give a "
            "request other bits in another batch; use path='bridge'"
        )


def attend_over_cache(
    cache: StagedCache, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Stores new keys and values [b, g, t, d] at the positions of the StagedCache, and returns the attention
    outputs [b, t, h * d] of new queries [b, h, t, d] over the cached slots."""
    if cache.spans is None:
        keys, values = cache.write(layer, k, v)
        return attend_together(q, keys, values, mask, scale)
    cache.store(layer, k, v)
    return attend_by_request(q, partial(cache.row_view, layer), mask, cache.spans, scale)


def _edited(query: Tensor, functions: Sequence[Callable[[Tensor], Tensor | None]]) -> Tensor:
    """Returns queries [b, h, t, d] after functions of [b, t, h, d], each of which may return others."""
    for function in functions:
        new = function(query.transpose(1, 2))
        query = query if new is None else new.transpose(1, 2)
    return query


def _interface(
    module: LiveModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Computes attention for transformers from queries [b, h, t, d] and keys and values [b, g, s, d]; returns (outputs
    [b, t, h, d], None)."""
    if unknown := [name for name in _UNKNOWN_TERMS if others.get(name) is not None]:
        raise ModelError(f"{type(module).__name__} attends with {unknown[0]}, which is not computed here")
    if attention_mask is None:
        raise ModelError(f"{type(module).__name__} attends without a mask")
    calls = _calls.get()
    cached = partial(first_slots, key, value)
    for site, functions in (calls.listeners.get(id(module), {}) if calls is not None else {}).items():
        assert calls is not None
        if id(module) in calls.layers:
            raise ModelError(
                f"{type(module).__name__} attends more than once, so no single {site} is there; leave it out"
            )
        if site == QUERY:
            query = _edited(query, functions)
            continue
        seen = OF_ATTENTION[site](query, cached, attention_mask, calls.spans, scaling, softcap, s_aux)
        for function in functions:
            function(seen)
    if calls is not None and calls.tape is not None:
        out = calls.tape.attend(query, (key, value), attention_mask, scaling, softcap, s_aux)
    elif calls is not None and calls.attend is not None and s_aux is None and softcap is None:
        out = calls.attend(int(module.layer_idx), query, scaling)
    elif calls is None or calls.spans is None:
        out = attend_together(query, key, value, attention_mask, scaling, softcap, s_aux)
    else:
        out = attend_by_request(query, cached, attention_mask, calls.spans, scaling, softcap, s_aux)
    if calls is not None:
        calls.layers.add(id(module))
    return out.unflatten(-1, (query.shape[1], -1)), None


AttentionInterface.register(ATTENTION, _interface)
