"""Finds the steps from the last residual stream of a plain transformers model to its logits."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from cacheprobe.core.live import LiveConfig, LiveModule
from cacheprobe.models.base import ModelError
from cacheprobe.models.hf.lm import Head
from cacheprobe.models.plain.watch import Call, Watched

_CLOSE = 1e-4
_CLOSE_IN_16_BITS = 3e-2


def find_head(model: LiveModule, watched: Watched, stream: Tensor, config: LiveConfig, dtype: torch.dtype) -> Head:
    """Returns the Head of a model. stream: what the last block gave in `watched`.

    Raises: ModelError if no module maps the stream to the input of the unembedding, or if the logits are computed from
    the unembedding's output in an unknown way.
    """
    is_wide = dtype in (torch.float32, torch.float64)
    limit = _CLOSE if is_wide else _CLOSE_IN_16_BITS
    unembed = model.get_output_embeddings()
    called = [call for call in watched.calls if call.module is unembed]
    if unembed is None or len(called) != 1 or called[0].value_in is None or called[0].value_out is None:
        raise ModelError("the model has no single unembedding")
    (last,) = called
    norm = _norm(watched.calls, stream, last)
    if norm is None and not is_wide and getattr(config, "residual_in_fp32", False):
        raise ModelError(
            f"it keeps the residual stream in float32 beside weights in {dtype}, and rounds it outside of a module; "
            'load it with dtype="float32", or with config.residual_in_fp32=False'
        )
    if norm is None:
        raise ModelError("no module maps the last block's output to the input of the unembedding")
    assert last.value_out is not None
    distances = [(_distance(f(last.value_out.clone()), watched.logits), f) for f in _finishes(config)]
    distance, finish = min(distances, key=lambda one: one[0])
    if distance <= limit:
        return Head(norm, unembed, finish)
    raise ModelError("the logits are not the unembedding's output, scaled or capped as the config says")


def _norm(calls: list[Call], stream: Tensor, last: Call) -> nn.Module | None:
    """Returns the module, or two in a row, that map the last stream to the unembedding's input; Identity if equal, None
    if no module does."""
    target = last.value_in
    assert target is not None
    if target.shape == stream.shape and torch.equal(target, stream):
        return nn.Identity()
    outer = [c for c in reversed(calls) if c.value_in is not None and c.value_out is not None and c.ended < last.began]
    firsts = [c for c in outer if c.value_in is not None and _equal(c.value_in, stream)]
    for call in firsts:
        if call.value_out is not None and _equal(call.value_out, target):
            return call.module
    for first in firsts:  # a norm, then a transformation, as in BERT
        for second in outer:
            if second.value_in is None or second.value_out is None or first.value_out is None:
                continue
            if _equal(second.value_in, first.value_out) and _equal(second.value_out, target):
                return nn.Sequential(first.module, second.module)
    return None


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _distance(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference, relative to the largest value; infinity for tensors of other shapes."""
    if a.shape != b.shape:
        return float("inf")
    return float((a.double() - b.double()).abs().max()) / max(float(b.abs().max()), 1e-30)


def _finishes(config: LiveConfig) -> list[Callable[[Tensor], Tensor]]:
    """Returns the functions that may follow the unembedding: none, and those whose number the config holds."""
    found: list[Callable[[Tensor], Tensor]] = [_same]
    for name, function in (
        ("final_logit_softcapping", _capped),
        ("output_logit_soft_cap", _capped),
        ("logits_scaling", _divided),
        ("logits_scaling", _multiplied),
        ("logit_scale", _multiplied),
        ("lm_head_multiplier", _multiplied),
    ):
        number = getattr(config, name, None)
        if isinstance(number, int | float) and number:
            found.append(partial(function, float(number)))
    return found


def _same(logits: Tensor) -> Tensor:
    return logits


def _capped(cap: float, logits: Tensor) -> Tensor:
    return (logits / cap).tanh() * cap


def _divided(number: float, logits: Tensor) -> Tensor:
    return logits / number


def _multiplied(number: float, logits: Tensor) -> Tensor:
    return logits * number
