"""Applies a linear map to states before they are inserted into a prompt."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cacheprobe.models.base import CachedLM

LinearMap: TypeAlias = "Callable[[Tensor], Tensor] | Tensor | nn.Linear"
"""Map from source states [n, m] to target states [n, k]: a function, a matrix [k, m], or a linear module."""


def mapped(
    states: Float[Tensor, "n m"], linear_map: "LinearMap | None", model: CachedLM, source: str
) -> Float[Tensor, "n k"]:
    """Returns the states [n, k] after the map, in the dtype and on the device of the model that reads them.

    source: names the states in messages, such as "those of the trace".
    Raises: ValueError for states of another width than the map's or, after it, than the model's.
    """
    wide = states if states.dtype == torch.float64 else states.float()
    if isinstance(linear_map, nn.Linear):
        device, dtype = linear_map.weight.device, linear_map.weight.dtype
        if linear_map.in_features != states.shape[1]:
            raise ValueError(f"linear_map takes states of width {linear_map.in_features}, {source} have "
                             f"{states.shape[1]}")  # fmt: skip
        found: object = linear_map(wide.to(device, dtype))
    elif isinstance(linear_map, Tensor):
        if linear_map.dim() != 2 or linear_map.shape[1] != states.shape[1]:
            raise ValueError(
                f"linear_map is {list(linear_map.shape)}; a matrix from these states to {model.name} is "
                f"[{model.d_model}, {states.shape[1]}]"
            )
        found = wide.to(linear_map.device) @ linear_map.to(wide.dtype).T
    else:
        found = wide.clone() if linear_map is None else linear_map(wide.clone())
    if not isinstance(found, Tensor) or found.shape != (len(states), model.d_model):
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        remedy = "" if linear_map is not None else "; give a linear_map between the two models"
        raise ValueError(
            f"states for {model.name} must be {[len(states), model.d_model]}, "
            f"{'the linear_map gave' if linear_map is not None else f'{source} are'} {got}{remedy}"
        )
    return found.detach().to(model.device, model.dtype)
