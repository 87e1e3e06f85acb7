"""Runs a model once without a cache and returns the gradient of a number with respect to its states."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from cacheprobe.core.hook_names import HEADS, SITES
from cacheprobe.models.base import CachedLM, ModelError, StateEdit
from cacheprobe.models.paths import choose_path
from cacheprobe.models.settings import hold_model, keeping_float64

if TYPE_CHECKING:
    from cacheprobe.models.hf.bridge import BridgeLM
    from cacheprobe.models.plain.lm import PlainLM

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


def require_gradients(model: CachedLM) -> None:
    """Raises: ModelError for a model of whose states no gradient is taken, such as a Thinking States model: its forward
    writes thoughts, chosen tokens, through which no gradient flows."""
    if not hasattr(model, "whole_forward"):
        raise ModelError(
            f"{getattr(model, 'name', type(model).__name__)} is no transformers model, so no gradient is taken of its "
            "states; use a Hugging Face model from cp.load_model(...)"
        )


def derivatives(
    model: CachedLM,
    token_ids: Tensor,
    places: Iterable[tuple[str, int]],
    metric: Callable[[Tensor], object],
    about: str,
    edit: StateEdit | None = None,
) -> Derivatives:
    """Runs token_ids [b, n] through the model in one forward without a cache, and returns the Derivatives of
    `metric(logits)`, with logits [b, n, v], with respect to the states at `places`, (site, layer) pairs.

    The gradient of a state is of everything that is computed from it later: T and C reach the logits through S. Weights
    get no gradient. The hooks that a user set on the model act.
    about: what is differentiated, for errors.  edit: replaces the states at `places`, before the gradient is taken.
    Raises: ModelError as `require_gradients`; ValueError if the metric does not return one finite number that depends
    on the logits, and for a gradient that is not finite.
    Twin: tests.twins.gradients_slowly.gradient_slowly: central differences of plain forwards, close(1e-6) in float64.
    """
    require_gradients(model)
    wanted = list(dict.fromkeys(places))
    caught: dict[tuple[str, int], Tensor] = {}

    def catch(site: str, layer: int, value: Tensor) -> Tensor:
        """Keeps the tensor that the rest of the forward computes from, and returns it."""
        place = site, layer
        changed = None if edit is None or place not in wanted else edit(site, layer, value)
        value = value if changed is None else changed
        # a replaced state begins a graph, and so does one that nothing before it needs a gradient of
        is_first = place == _INPUT or changed is not None or not value.requires_grad
        caught[place] = value.detach().requires_grad_() if is_first else value.view_as(value)
        return caught[place].clone()  # some families add to it in place

    with hold_model(model), torch.inference_mode(False), torch.enable_grad(), keeping_float64(model.dtype):
        runner = cast("BridgeLM | PlainLM", choose_path(model)[0])
        with runner.editing(list(dict.fromkeys([_INPUT, *wanted])), catch):
            logits = runner.whole_forward(token_ids.clone().to(runner.device))
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
