"""Defines interventions that compute each state from itself by a function.

Each state is computed by a call of its own, so that its bits depend on no other token of the pass.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from cacheprobe.core.hook_names import place_of
from cacheprobe.core.values import source_sha256
from cacheprobe.edits.interventions.base import Intervention, StateContext
from cacheprobe.edits.interventions.make import Numbers

StateFunction: TypeAlias = Callable[[Tensor, StateContext], Tensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class Function(Intervention):
    """Describes a change that a function computes. Create one with `function`, `ablate`, `project` or `clamp`."""

    function: StateFunction = field(repr=False)
    """Takes a copy of the state [w] in the model's dtype, and its StateContext; returns the new state."""
    source_sha256: str
    """SHA-256 of the function's source, or of the directions."""

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
        if not isinstance(new, Tensor):
            raise ValueError(f"{place}: the function returned {type(new).__name__}; return the state, a tensor")
        if new.shape != shape or new.dtype != dtype or new.device != device:
            raise ValueError(
                f"{place}: the function returned {list(new.shape)} {new.dtype} on {new.device}, where a state is "
                f"{list(shape)} {dtype} on {device}"
            )
        return new.detach()

    def record(self) -> dict[str, object]:
        """As Intervention.record, with the function's source_sha256 instead of that of vectors."""
        kept = {name: value for name, value in super().record().items() if name != "vectors_sha256"}
        return {**kept, "source_sha256": self.source_sha256}


def function(
    f: StateFunction,
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
    name: str | None = None,
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, which sets each state to `f(state, context)`. The other arguments
    are the fields of an Intervention.

    f: gets a copy of one state [m] (for a head: [d]) in the model's dtype and on its device, and a StateContext; it
    returns a state of the same shape, dtype and device. It must give the same for the same arguments: a position is
    computed in a draft, again when the draft is verified, and once more if the request is preempted.
    name: what errors and the run's metadata call it; by default the function's own name.

    If `f` raises an error, or returns another shape or dtype, NaN or infinity, its request ends with an error that
    names the place; other requests go on.
    """
    digest = source_sha256(f)
    return tuple(
        Function(
            name=name or getattr(f, "__name__", type(f).__name__), action="function", vectors=torch.zeros(1, 1),
            function=f, source_sha256=digest, request_id=request_id, site=at, layer=layer, positions=positions,
            head=head, phases=phases, steps=steps, own_fingerprint=own_fingerprint,
            num_prompt_tokens=num_prompt_tokens,
        )
        for at, layer in places_of(site, layers, "function")
    )  # fmt: skip


def places_of(site: str, layers: "int | Iterable[int] | None", what: str) -> list[tuple[str, int]]:
    """Returns (site, layer) of a site at one layer or several, or of a hook point that names its layer. Raises:
    ValueError for no layer: nothing would change."""
    listed = [operator.index(one) for one in layers] if isinstance(layers, Iterable) else [layers]
    if not listed:
        raise ValueError(f"{what}: layers is empty, so nothing would change")
    return [place_of(site, layer) for layer in listed]
