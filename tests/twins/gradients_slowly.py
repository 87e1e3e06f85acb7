"""Gradients the slow way: central differences of whole uncached forwards of the plain Hugging Face model.

Shares no code with `cp.gradients` and `cp.patching.attribution`: no autograd, no bridge, one forward for each side.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import cacheprobe as cp
from tests.twins.patching_slowly import on

EPSILON = 1e-5
"""Half of the step. With values of about 1 in float64, rounding adds 1e-16 / 1e-5 = 1e-11 to a difference quotient,
and the third derivative 1e-10."""
Slow = Callable[[Tensor], float]
"""Function of logits [n, v] in float64."""


class _Wide(TorchFunctionMode):
    """Norms of transformers round their input to float32; inside the `with` they do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
            kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in kwargs.items()}
        return func(*args, **kwargs)


@torch.inference_mode()
def logits_slowly(model: Any, ids: Sequence[int], place: tuple[str, int], change: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits [n, v] of one forward in which `change` acts on the states [n, w] of a site and layer."""
    site = "heads" if place[0] == "z" else place[0]
    with on(model, site, place[1], lambda value: change(value[0].clone())[None]), _Wide():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


def states_slowly(model: Any, ids: Sequence[int], place: tuple[str, int]) -> Tensor:
    """States [n, w] of a site and layer."""
    seen = []
    logits_slowly(model, ids, place, lambda value: seen.append(value.clone()) or value)
    return seen[0]


def gradient_slowly(
    model: Any, ids: Sequence[int], place: tuple[str, int], position: int, direction: Tensor, metric: Slow
) -> float:
    """The derivative of the metric, as the state of one site, layer and position moves along `direction` [w]."""
    sides = []
    for sign in (1, -1):

        def moved(value: Tensor, sign: int = sign) -> Tensor:
            value[position] += sign * EPSILON * direction
            return value

        sides.append(metric(logits_slowly(model, ids, place, moved)))
    return (sides[0] - sides[1]) / (2 * EPSILON)


def rejected_texts_slowly(trace: cp.Trace) -> Mapping[tuple[int, int], tuple[list[int], int]]:
    """{(request, verify step): (text with the rejected draft, position of its first rejected token)}, from the events:
    what was committed before the draft, and the draft."""
    found = {}
    for event in trace.events().itertuples():
        if event.phase == "verify" and event.num_rolled_back:
            request = trace.requests[event.request_id]
            whole = [*request.prompt_token_ids, *trace.committed(event.request_id)]
            text = whole[: int(event.draft_start)] + [int(token) for token in event.draft_token_ids]
            found[event.request_id, event.step] = text, int(event.draft_start) + int(event.num_accepted)
    return found


def attribution_slowly(
    model: Any,
    clean: list[int],
    corrupt: list[int],
    site: str,
    metric: Slow,
    *,
    shares: Sequence[float] = (),
    heads: int = 1,
) -> Mapping[tuple[int, ...], float]:
    """{(layer, position) or (layer, position, head): estimate} of every cell: the derivative of the metric, as a state
    of the corrupted run moves towards that of the clean run.

    shares: instead, the mean of the derivatives at these points, where all positions of the layer have gone that share
    of the way."""
    out: dict[tuple[int, ...], float] = {}
    for layer in range(model.config.num_hidden_layers):
        low, high = (states_slowly(model, ids, (site, layer)) for ids in (corrupt, clean))
        for position in range(len(corrupt)):
            for head in range(heads):
                part = torch.zeros_like(low)
                width = low.shape[1] // heads
                own = slice(head * width, (head + 1) * width)
                part[position, own] = (high - low)[position, own]
                numbers = []
                for share in shares or (0.0,):
                    at = low + share * (high - low)
                    sides = [
                        metric(logits_slowly(model, corrupt, (site, layer), lambda _, x=at + sign * EPSILON * part: x))
                        for sign in (1, -1)
                    ]
                    numbers.append((sides[0] - sides[1]) / (2 * EPSILON))
                index = (layer, position) if heads == 1 else (layer, position, head)
                out[index] = sum(numbers) / len(numbers)
    return out
