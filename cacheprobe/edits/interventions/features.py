"""Defines interventions on a feature of a dictionary, or on experts of a mixture."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Unpack

import torch
from torch import Tensor

from cacheprobe.core.hook_names import ROUTER
from cacheprobe.core.values import listed, number, whole_number
from cacheprobe.edits.interventions.base import Acting, Intervention, StateContext, checked_fields
from cacheprobe.edits.interventions.functions import places_of
from cacheprobe.lenses.dictionaries import Dictionary, DictionaryError


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureChange(Intervention):
    """Removes what one feature of a dictionary adds to a state: the feature's activation in this state, times its
    direction. Create one with `ablate_feature`."""

    dictionary: Dictionary = field(repr=False)
    feature: int
    """Number of the feature."""

    def require_width(self, width: int) -> None:
        """Raises: DictionaryError if the dictionary was made for states of another width."""
        self.dictionary.require_width(width, f"{self}: a state")

    def changed(self, states: Tensor, contexts: Sequence[StateContext]) -> Tensor:
        """Returns the states [n, m] without the feature, in their dtype. The part is computed in float32, and for
        each state by itself, so that its bits do not depend on the other states of a pass."""
        part = self.dictionary.part_of(states, self.feature).to(states.device)
        wide = states if states.dtype == torch.float64 else states.float()
        return (wide - part).to(states.dtype)

    def record(self) -> dict[str, object]:
        """Returns the entries of `Intervention.record`, the feature, and the SHA-256 of the dictionary."""
        return {**super().record(), "feature": self.feature, "dictionary_sha256": self.dictionary.sha256}


def steer_feature(
    dictionary: Dictionary,
    feature: int,
    strength: float,
    *,
    include_special: bool = False,
    **when: Unpack[Acting],
) -> Intervention:
    """Returns an Intervention that adds `strength` times the decoder's row of a feature to the states that the
    dictionary decodes; a transcoder's are those of the hook point that it predicts.

    include_special: also at special tokens and the first position, where no dictionary was trained by default.
    strength: in units of the feature's activation, for a dictionary that does not scale states. Negative: against it.
    Source: SAELens' tutorial on steering: the decoder's row times a coefficient, added to the residual stream.
    Raises: DictionaryError for an unknown feature, and if the hook point is not S, T, C or the input of a block.
    """
    fields = checked_fields("steer_feature", when, Acting)
    site, layer = _place(dictionary, dictionary.config.place_out)
    vector = number("strength", strength) * dictionary.direction(whole_number("feature", feature)).cpu()
    return Intervention(
        name="steer_feature", action="add", vectors=vector, site=site, layer=layer,
        include_special=include_special, **fields,
    )  # fmt: skip


def ablate_feature(
    dictionary: Dictionary,
    feature: int,
    *,
    include_special: bool = False,
    **when: Unpack[Acting],
) -> Intervention:
    """Returns an Intervention that removes one feature from the states: each loses the feature's activation in it,
    times the decoder's row. A state in which the feature is not active keeps its bits.

    The rest of the state stays, also what the dictionary does not reconstruct.
    include_special: as in `steer_feature`.
    Raises: DictionaryError for an unknown feature, a transcoder, and a hook point that is not S, T, C or the input of a
    block.
    Twin: a plain hook on an uncached forward, in tests.interventions.test_feature_interventions.
    """
    fields = checked_fields("ablate_feature", when, Acting)
    site, layer = _place(dictionary, dictionary.config.place)
    dictionary.part_of(torch.zeros(0, dictionary.config.d_in), whole_number("feature", feature))  # raises errors early
    return FeatureChange(
        name="ablate_feature", action="function", vectors=torch.zeros(1, 1), dictionary=dictionary,
        feature=int(feature), site=site, layer=layer, include_special=include_special, **fields,
    )  # fmt: skip


def _place(dictionary: Dictionary, place: tuple[str, int] | None) -> tuple[str, int]:
    """Returns the site and layer to change. Raises: DictionaryError if an intervention cannot change them."""
    if place is None or place[0] not in ("S", "T", "C", "pre"):
        named = dictionary.config.hook_out or dictionary.hook
        raise DictionaryError(
            f"states at {named or 'an unnamed hook point'} cannot be changed; load the dictionary with hook=, one of "
            "S, T, C or the input of a block"
        )
    return place


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
    layers: "int | Iterable[int]",
    **when: Unpack[Acting],
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
    fields = checked_fields("ablate_expert", when, Acting)
    numbers = tuple(sorted({whole_number("experts: an expert", one, at_least=0) for one in listed(experts)}))
    if not numbers:
        raise ValueError("ablate_expert: experts is empty, so nothing would change")
    return tuple(
        ExpertAblation(
            name="ablate_expert", action="function", vectors=torch.zeros(1, 1), experts=numbers,
            site=site, layer=layer, **fields,
        )
        for site, layer in places_of(ROUTER, layers, "ablate_expert")
    )  # fmt: skip
