"""Defines interventions that compute each state from itself: by a given function, or by its part along directions.

Each state is computed by a call of its own, so that its bits depend on no other token of the pass. Parts along
directions are computed in float32, or in float64 for a float64 model.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, Unpack

import torch
from torch import Tensor

from cacheprobe.core.hook_names import is_module, place_of
from cacheprobe.core.values import listed, name_of
from cacheprobe.edits.interventions.base import HookOptions, Intervention, StateContext, WhereLayers, checked_fields
from cacheprobe.edits.interventions.digests import function_digest

StateFunction: TypeAlias = Callable[[Tensor, StateContext], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Function(Intervention):
    """Describes a change that a function computes. Create one with `hook`, `ablate`, `project` or `clamp`."""

    function: StateFunction = field(repr=False)
    """Takes a copy of the state [w] in the model's dtype, and its StateContext; returns the new state."""
    source_sha256: str = ""
    """SHA-256 of the function's code and of the values that it uses, or of the directions. "" until a run starts, which
    uses a copy with the SHA-256 of that moment."""
    unnamed: str = ""
    """What the function uses that `source_sha256` does not hold, as text; "" if nothing."""

    def changed(self, states: Tensor, contexts: Sequence[StateContext]) -> Tensor:
        """As Intervention.changed. Raises: ValueError for a state of another shape or dtype, and if the function
        raises an error."""
        return torch.stack([self._one(state, context) for state, context in zip(states, contexts, strict=True)])

    def _one(self, state: Tensor, context: StateContext) -> Tensor:
        """Returns the function's state of one token. Raises: ValueError, see `changed`."""
        shape, dtype, device, place = state.shape, state.dtype, state.device, f"{self}, position {context.position}"
        try:
            new = self.function(state, context)
        except Exception as error:
            raise ValueError(f"{place}: the function raised {type(error).__name__}: {error!s:.200}") from error
        if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != (shape, dtype, device):
            wanted = f"a tensor {list(shape)} of {dtype} on {device}"
            got = f"{list(new.shape)} {new.dtype} on {new.device}" if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(f"{place}: the function returned {got}, where a state is {wanted}")
        return new.detach()

    def record(self) -> dict[str, object]:
        """As Intervention.record, with the function's source_sha256 instead of that of vectors."""
        kept = {name: value for name, value in super().record().items() if name != "vectors_sha256"}
        now = self.at_start({})
        return {**kept, "source_sha256": now.source_sha256, **({"unnamed": now.unnamed} if now.unnamed else {})}

    def at_start(self, digests: dict[int, tuple[str, str]]) -> "Function":
        """As Intervention.at_start: returns a copy with the present source_sha256 of the function."""
        if self.source_sha256:
            return self
        if (key := id(self.function)) not in digests:
            digests[key] = function_digest(self.function)
        source_sha256, unnamed = digests[key]
        return replace(self, source_sha256=source_sha256, unnamed=unnamed)


def hook(
    module_or_site: str, function: StateFunction, *, name: str | None = None, **where: Unpack[HookOptions]
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, which sets a module's output, or our states at a site, to
    `function(state, context)`, token by token. The other arguments are the fields of an Intervention.

    module_or_site: a module by its name in `named_modules()`, such as "model.layers.3.mlp", with "*" for `layers`; or a
    site, such as "S". Endings: ".input" for a module's input; ".query" for an attention's queries after the rotation;
    ".output[1]" for the second of several tensors.
    function: gets a copy of one token's state, [m] or of the module's own shape (for a head: [d]), in the model's dtype
    and on its device, and a StateContext; it returns a state of the same shape, dtype and device. It must give the same
    for the same arguments, and never sees other tokens: a position is computed in a draft, again when the draft is
    verified, and once more if the request is preempted.
    name: what errors and the run's metadata call it; by default the function's own name.

    If the function raises an error, or returns another shape or dtype, NaN or infinity, its request ends with an error
    that names the place; other requests go on. Each run's fingerprint has a digest of the
    function and of the values that it uses when the run starts, see `function_digest`.
    """
    if not callable(function):
        raise ValueError(f"hook: the second argument must be a function of (state, context), got {function!r:.60}")
    made = dict(name=name or name_of(function), function=function, vectors=torch.zeros(1, 1))
    fields = {**checked_fields("hook", where, HookOptions), **made}
    places = places_of(module_or_site, fields.pop("layers", None), "hook")
    return tuple(
        Function(action="function", site=site, layer=layer, keeps_shape=is_module(site), **fields)
        for site, layer in places
    )


def ablate(directions: Tensor, **where: Unpack[WhereLayers]) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, which removes from states their part in the span of `directions`:
    [m] or [k, m]; for a head [d] or [k, d].

    Raises: ValueError for directions that are not finite or depend on each other.
    Source: directional ablation of Arditi et al. 2024 (arXiv 2406.11717), section 2.4.
    """
    return _along("ablate", _orthonormal(directions, "ablate"), lambda state, by, basis: state - by @ basis, where)


def project(directions: Tensor, **where: Unpack[WhereLayers]) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, which keeps of states only their part in the span of `directions`:
    [m] or [k, m]; for a head [d] or [k, d].

    Raises: ValueError for directions that are not finite or depend on each other.
    """
    return _along("project", _orthonormal(directions, "project"), lambda state, by, basis: by @ basis, where)


def clamp(
    direction: Tensor, low: float | None = None, high: float | None = None, **where: Unpack[WhereLayers]
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, which keeps the coefficient of states along `direction` [m] (for a
    head: [d]) between `low` and `high`; None is no bound.

    The coefficient is the scalar product with the direction of length 1; low = high sets it.
    Raises: ValueError for a direction that is zero or not finite, and without a bound.
    """
    bounds = [bound for bound in (low, high) if bound is not None]
    if not bounds or bounds != sorted(bounds) or not all(map(math.isfinite, bounds)):
        raise ValueError(f"clamp: give finite low, high or both, low at most high; got low={low}, high={high}")
    basis = _orthonormal(direction, "clamp")
    if len(basis) != 1:
        raise ValueError(f"clamp: give one direction, got {len(basis)}; make one Intervention for each")

    def between(state: Tensor, by: Tensor, basis: Tensor) -> Tensor:
        """Returns the state with its coefficient moved between the two bounds."""
        return state + (by.clamp(low, high) - by) @ basis

    return _along("clamp", basis, between, where, low, high)


def _along(
    name: str, basis: Tensor, join: Callable[[Tensor, Tensor, Tensor], Tensor], where: WhereLayers,
    *bounds: float | None,
) -> tuple[Intervention, ...]:  # fmt: skip
    """Returns the Interventions of a function that changes the part of states along an orthonormal basis [k, w]. join:
    returns the new state from the old one, its coefficients [k] along the basis, and the basis."""
    digest = hashlib.sha256(basis.numpy().tobytes() + repr(bounds).encode()).hexdigest()

    def changed(state: Tensor, context: StateContext) -> Tensor:
        """Returns the new state, in its dtype."""
        wide = state if state.dtype == torch.float64 else state.float()
        directions = basis.to(wide.device, wide.dtype)
        return join(wide, directions @ wide, directions).to(state.dtype)

    return _by_layer(name, where, name, changed, digest, torch.zeros(1, basis.shape[1]))


def _by_layer(
    caller: str, where: WhereLayers, name: str, function: StateFunction, sha256: str, vectors: Tensor
) -> tuple[Intervention, ...]:
    """Returns a Function for each layer of `where`, the keyword arguments of the function named `caller`. name,
    function, sha256 (its source_sha256), vectors: of each."""
    fields = checked_fields(caller, where, WhereLayers)
    places = places_of(fields.pop("site"), fields.pop("layers", None), caller)
    fields |= dict(name=name, function=function, source_sha256=sha256, vectors=vectors)
    return tuple(Function(action="function", site=site, layer=layer, **fields) for site, layer in places)


def places_of(site: object, layers: object, what: str) -> list[tuple[str, int]]:
    """Returns (site, layer) of a site at one layer or several, or of a hook point that names its layer. Raises:
    ValueError for a site that is no text, for layers that are no numbers, and for no layer: nothing would change."""
    if not isinstance(site, str):
        raise ValueError(
            f"{what}: give the module's name as in named_modules(), such as 'model.layers.3.mlp', or a site, such as "
            f"'S'; got a {type(site).__name__}"
        )
    if isinstance(layers, str):
        raise ValueError(
            f"{what}: layers must be a number or several, got {layers!r:.60}; for all layers give range(model.n_layers)"
        )
    given = [None if layer is None else operator.index(layer) for layer in listed(layers)]
    if not given:
        raise ValueError(f"{what}: layers is empty, so nothing would change")
    return [place_of(site, layer) for layer in given]


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
