"""Runs a model once without a cache and returns the gradient of a number with respect to its states."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, SITES, hook_name
from cacheprobe.models.base import CachedLM, ModelError, StateEdit
from cacheprobe.models.settings import evaluating, hold_model, keeping_float64

if TYPE_CHECKING:  # it loads transformer_lens, which takes seconds
    from cacheprobe.models.hf.bridge import BridgeLM
    from cacheprobe.models.hf.hooked import HookPoint

GRADIENT_SITES = ("pre", *SITES, HEADS)
"""Sites whose states a gradient can be taken of."""
_INPUT = ("pre", 0)


@dataclass(frozen=True, eq=False)
class Derivatives:
    """Holds a number that was computed from a model's logits, the states of the forward, and its gradients."""

    value: float
    states: dict[tuple[str, int], Tensor] = field(repr=False)
    """By (site, layer): [b, n, m], or [b, n, h, d] for single heads."""
    gradients: dict[tuple[str, int], Tensor] = field(repr=False)
    """By (site, layer), of the shape of the states, on their device and in their dtype."""


def bridge_of(model: CachedLM) -> "BridgeLM":
    """Returns the BridgeLM around a model's weights: of a BridgeLM itself, of its fast forward, the BridgeLM.

    Raises: ModelError for another model, such as a Thinking States model: its forward writes thoughts, chosen tokens,
    through which no gradient flows.
    """
    origin: CachedLM = getattr(model, "origin", model)
    if not hasattr(origin, "bridge"):
        raise ModelError(
            f"{getattr(model, 'name', type(model).__name__)} has no TransformerBridge, so no gradient is taken of its "
            "states; use a Hugging Face model from cp.load_model(...)"
        )
    return cast("BridgeLM", origin)


def derivatives(
    model: CachedLM,
    token_ids: Tensor,
    places: Iterable[tuple[str, int]],
    metric: Callable[[Tensor], object],
    about: str,
    edit: StateEdit | None = None,
) -> Derivatives:
    """Runs token_ids [b, n] through the bridge in one forward without a cache, and returns the Derivatives of
    `metric(logits)`, with logits [b, n, v], with respect to the states at `places`, (site, layer) pairs.

    The gradient of a state is of everything that is computed from it later: T and C reach the logits through S. Weights
    get no gradient. The hooks that a user set on the bridge act.
    about: what is differentiated, for errors.  edit: replaces the states at `places`, before the gradient is taken.
    Raises: ModelError as `bridge_of`; ValueError if the metric does not return one finite number that depends on the
    logits, and for a gradient that is not finite.
    Twin: tests.twins.gradients_slowly.gradient_slowly: central differences of plain forwards, close(1e-6) in float64.
    """
    bridge = bridge_of(model)
    wanted = list(dict.fromkeys(places))
    caught: dict[tuple[str, int], Tensor] = {}

    def catch(place: tuple[str, int], value: Tensor, hook: "HookPoint") -> Tensor:
        """Keeps the tensor that the rest of the forward computes from, and returns it."""
        changed = None if edit is None or place not in wanted else edit(*place, value)
        value = value if changed is None else changed
        # a replaced state begins a graph, and so does the input of block 0, if the weights are frozen
        is_first = place == _INPUT or changed is not None
        caught[place] = value.detach().requires_grad_() if is_first else value.view_as(value)
        return caught[place]

    hooks = [(hook_name(*place), partial(catch, place)) for place in dict.fromkeys([_INPUT, *wanted])]
    with hold_model(bridge), torch.inference_mode(False), torch.enable_grad(), keeping_float64(bridge.dtype):
        with bridge.bridge.hooks(fwd_hooks=hooks), evaluating(bridge.bridge.original_model):
            logits = bridge.bridge.forward(token_ids.clone().to(bridge.device), return_type="logits")
        result = _checked_result(metric(logits), about)
        found = torch.autograd.grad(result, [caught[place] for place in wanted], allow_unused=True)
    gradients: dict[tuple[str, int], Tensor] = {}
    for place, gradient in zip(wanted, found, strict=True):
        where = f"{about}: the gradient with respect to site {place[0]} of layer {place[1]}"
        if gradient is None:
            raise ValueError(
                f"{where} does not exist: the metric does not depend on that state; compute it from logits"
            )
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError(f"{where} has NaN or infinite numbers; load the model in float32, or change the metric")
        gradients[place] = gradient
    return Derivatives(result.item(), {place: caught[place].detach() for place in wanted}, gradients)


def _checked_result(result: object, about: str) -> Tensor:
    """Returns what a metric returned. Raises: ValueError unless it is a tensor of one finite number with a graph."""
    if not isinstance(result, Tensor):
        raise ValueError(f"{about}: the metric must return a tensor of one number, got a {type(result).__name__}")
    if result.numel() != 1 or result.dim() > 1:
        raise ValueError(
            f"{about}: the metric must return a tensor of one number, got shape {list(result.shape)}; end it with "
            ".sum() or .mean()"
        )
    if not result.requires_grad:
        raise ValueError(
            f"{about}: the metric's result does not depend on the logits by differentiable steps; leave out .detach(), "
            ".item() and argmax"
        )
    if not bool(torch.isfinite(result).all()):
        raise ValueError(f"{about}: the metric returned {result.item()}; a gradient needs a finite number")
    return result.reshape(())
