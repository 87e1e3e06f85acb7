"""Defines the intervention ablate_expert: a router cannot choose some experts of a mixture."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheprobe.core.hook_names import ROUTER
from cacheprobe.core.values import whole_number
from cacheprobe.edits.interventions.base import Intervention, StateContext
from cacheprobe.edits.interventions.functions import places_of
from cacheprobe.edits.interventions.make import Numbers


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertAblation(Intervention):
    """Sets the router's logits of some experts to the lowest finite number of their dtype. Create one with
    `ablate_expert`."""

    experts: tuple[int, ...]

    def require_width(self, width: int) -> None:
        """Raises: ValueError for an expert that a router of `width` experts does not have."""
        if max(self.experts) >= width:
            raise ValueError(f"{self}: unknown expert {max(self.experts)}; the layer has experts 0 to {width - 1}")

    def changed(self, states: Tensor, contexts: Sequence[StateContext]) -> Tensor:
        """Returns the logits [n, e] with those of the ablated experts at the lowest number."""
        new = states.clone()
        new[:, list(self.experts)] = torch.finfo(states.dtype).min
        return new

    def record(self) -> dict[str, object]:
        """Returns the entries of `Intervention.record`, and the experts instead of vectors."""
        kept = {name: value for name, value in super().record().items() if name != "vectors_sha256"}
        digest = hashlib.sha256(repr(self.experts).encode()).hexdigest()
        return {**kept, "experts": list(self.experts), "experts_sha256": digest}


def ablate_expert(
    experts: "int | Iterable[int]",
    *,
    request_id: int,
    layers: "int | Iterable[int]",
    positions: Numbers = None,
    phases: "str | Iterable[str] | None" = None,
    steps: Numbers = None,
    own_fingerprint: bool = False,
) -> tuple[Intervention, ...]:
    """Returns one Intervention for each of `layers`, after which the router cannot choose these experts: their logits
    become the lowest finite number.

    The next best experts take their places, so that as many experts as before compute a token. The weights are
    normalised over the chosen experts as the model's router does it. DeepSeek-V3 adds a bias to the scores by which it
    chooses, so it may still choose an ablated expert; the expert's weight is then zero.
    experts: one or several, counted from 0.  layers: one or several layers with a mixture of experts.
    Raises: ValueError for a negative expert or none; in the run, for an unknown expert, a layer without experts or
    router (afmoe, hunyuan_v1_moe and phimoe compute their routing otherwise), and if fewer experts remain than compute
    a token. Experts of several interventions are counted apart.
    Twin: tests.experts.slowly.ablated_slowly, whose logit is minus infinity: the same tokens and experts.
    """
    listed = list(experts) if isinstance(experts, Iterable) else [experts]
    numbers = tuple(sorted({whole_number("experts: an expert", one) for one in listed}))
    if not numbers or numbers[0] < 0:
        raise ValueError(f"ablate_expert: experts must be one or more numbers from 0 on, got {listed!s:.60}")
    return tuple(
        ExpertAblation(
            name="ablate_expert", action="function", vectors=torch.zeros(1, 1), experts=numbers, request_id=request_id,
            site=site, layer=layer, positions=positions, phases=phases, steps=steps, own_fingerprint=own_fingerprint,
        )
        for site, layer in places_of(ROUTER, layers, "ablate_expert")
    )  # fmt: skip
