"""Defines interventions that change a state's part along given directions (ablate, project, clamp), and steer, which
adds a vector at each of several layers.

Parts are computed in float32, or in float64 for a float64 model. Keyword arguments that are not described are the
fields of an Intervention.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from cacheprobe.edits.interventions.base import Intervention, StateContext, as_wide
from cacheprobe.edits.interventions.functions import Function, places_of
from cacheprobe.edits.interventions.make import Numbers, add
from cacheprobe.edits.interventions.steering_files import read_steering


def ablate(
    directions: Tensor,
    *,
    request_id: int,
    site: str,
    layers: "int | Iterable[int] | None" = None,
    positions: Numbers = None,
    head: int | None = None,
    phases: "str | Iterable[str] | None" = None,
    steps: Numbers = None,
    own_fingerprint: bool = False,
    num_prompt_tokens: int | None = None,
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, which removes from states their part in the span of `directions`:
    [m] or [k, m]; for a head [d] or [k, d].

    Raises: ValueError for directions that are not finite or depend on each other.
    Source: directional ablation of Arditi et al. 2024 (arXiv 2406.11717), section 2.4.
    """
    basis = _orthonormal(directions, "ablate")
    return tuple(
        Function(
            name="ablate", action="function", vectors=torch.zeros(1, basis.shape[1]), function=_Split(basis, _without),
            source_sha256=_digest(basis), request_id=request_id, site=at, layer=layer, positions=positions, head=head,
            phases=phases, steps=steps, own_fingerprint=own_fingerprint, num_prompt_tokens=num_prompt_tokens,
        )
        for at, layer in places_of(site, layers, "ablate")
    )  # fmt: skip


def project(
    directions: Tensor,
    *,
    request_id: int,
    site: str,
    layers: "int | Iterable[int] | None" = None,
    positions: Numbers = None,
    head: int | None = None,
    phases: "str | Iterable[str] | None" = None,
    steps: Numbers = None,
    own_fingerprint: bool = False,
    num_prompt_tokens: int | None = None,
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, which keeps of states only their part in the span of `directions`:
    [m] or [k, m]; for a head [d] or [k, d].

    Raises: ValueError for directions that are not finite or depend on each other.
    """
    basis = _orthonormal(directions, "project")
    return tuple(
        Function(
            name="project", action="function", vectors=torch.zeros(1, basis.shape[1]), function=_Split(basis, _alone),
            source_sha256=_digest(basis), request_id=request_id, site=at, layer=layer, positions=positions, head=head,
            phases=phases, steps=steps, own_fingerprint=own_fingerprint, num_prompt_tokens=num_prompt_tokens,
        )
        for at, layer in places_of(site, layers, "project")
    )  # fmt: skip


def clamp(
    direction: Tensor,
    low: float | None = None,
    high: float | None = None,
    *,
    request_id: int,
    site: str,
    layers: "int | Iterable[int] | None" = None,
    positions: Numbers = None,
    head: int | None = None,
    phases: "str | Iterable[str] | None" = None,
    steps: Numbers = None,
    own_fingerprint: bool = False,
    num_prompt_tokens: int | None = None,
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, which keeps the coefficient of states along `direction` [m] (for a
    head: [d]) between `low` and `high`; None is no bound.

    The coefficient is the scalar product with the direction of length 1; low = high sets it.
    Raises: ValueError for a direction that is zero or not finite, and without a bound.
    """
    if (low is None and high is None) or (low is not None and high is not None and low > high):
        raise ValueError(f"clamp: give low, high or both, low at most high; got low={low}, high={high}")
    if not all(math.isfinite(bound) for bound in (low, high) if bound is not None):
        raise ValueError(f"clamp: bounds must be finite, got low={low}, high={high}")
    basis = _orthonormal(direction, "clamp")
    bounds = _Between(low, high)
    if len(basis) != 1:
        raise ValueError(f"clamp: give one direction, got {len(basis)}; make one Intervention for each")
    return tuple(
        Function(
            name="clamp", action="function", vectors=torch.zeros(1, basis.shape[1]), function=_Split(basis, bounds),
            source_sha256=_digest(basis, low, high), request_id=request_id, site=at, layer=layer, positions=positions,
            head=head, phases=phases, steps=steps, own_fingerprint=own_fingerprint, num_prompt_tokens=num_prompt_tokens,
        )
        for at, layer in places_of(site, layers, "clamp")
    )  # fmt: skip


def steer(
    vectors: "Mapping[int, Tensor] | str | Path",
    strength: float = 1.0,
    *,
    request_id: int,
    site: str = "S",
    positions: Numbers = None,
    phases: "str | Iterable[str] | None" = None,
    steps: Numbers = None,
    own_fingerprint: bool = False,
    num_prompt_tokens: int | None = None,
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each layer of `vectors`, which adds `strength` times the layer's vector.

    vectors: layer -> [m]; or the path of a control vector of repeng (.gguf), or of a safetensors file with a layer's
    number in each key, such as "12", "layer.12" or "direction.12".
    Raises: ValueError or OSError for a file that cannot be read, see `read_steering`.
    """
    by_layer = vectors if isinstance(vectors, Mapping) else read_steering(vectors)
    if not by_layer:
        raise ValueError("steer: there is no vector, so nothing would change")
    return tuple(
        add(
            strength * as_wide(vector), request_id=request_id, site=site, layer=layer, positions=positions,
            phases=phases, steps=steps, own_fingerprint=own_fingerprint, num_prompt_tokens=num_prompt_tokens,
        )
        for layer, vector in sorted(by_layer.items())
    )  # fmt: skip


class _Split:
    """The function of an Intervention: splits a state into its part in the span of an orthonormal basis [k, w] and the
    rest, and gives both to `join(state, coefficients, basis)`."""

    def __init__(self, basis: Tensor, join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.basis, self.join = basis, join

    def __call__(self, state: Tensor, context: StateContext) -> Tensor:
        wide = state.double() if state.dtype == torch.float64 else state.float()
        basis = self.basis.to(wide.device, wide.dtype)
        return self.join(wide, basis @ wide, basis).to(state.dtype)


def _without(state: Tensor, coefficients: Tensor, basis: Tensor) -> Tensor:
    return state - coefficients @ basis


def _alone(state: Tensor, coefficients: Tensor, basis: Tensor) -> Tensor:
    return coefficients @ basis


class _Between:
    """Moves the coefficient of a state between two bounds."""

    def __init__(self, low: float | None, high: float | None) -> None:
        self.low, self.high = low, high

    def __call__(self, state: Tensor, coefficients: Tensor, basis: Tensor) -> Tensor:
        return state + (coefficients.clamp(self.low, self.high) - coefficients) @ basis


def _orthonormal(directions: Tensor, what: str) -> Tensor:
    """Returns an orthonormal basis [k, w] in float64 of the span of directions [w] or [k, w]. Raises: ValueError for
    another shape, numbers that are not finite, and directions of which one lies in the span of the others."""
    given = torch.as_tensor(directions).detach().double().cpu()
    given = given[None] if given.dim() == 1 else given
    if given.dim() != 2 or not given.numel():
        raise ValueError(f"{what}: directions must be [w] or [k, w], got {list(given.shape)}")
    if not bool(torch.isfinite(given).all()):
        raise ValueError(f"{what}: directions hold NaN or infinity; give finite numbers")
    if int(torch.linalg.matrix_rank(given)) < len(given):
        raise ValueError(f"{what}: {len(given)} directions, of which one is zero or lies in the span of the others")
    if len(given) == 1:
        return given / given.norm()  # QR may turn it around
    return torch.linalg.qr(given.T).Q.T.contiguous()


def _digest(basis: Tensor, *bounds: float | None) -> str:
    return hashlib.sha256(basis.numpy().tobytes() + repr(bounds).encode()).hexdigest()
