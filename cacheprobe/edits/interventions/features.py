"""Defines interventions on a feature of a dictionary: steer_feature adds its direction, ablate_feature removes it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cacheprobe.core.values import number, whole_number
from cacheprobe.edits.interventions.base import Intervention, StateContext
from cacheprobe.edits.interventions.make import Numbers
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
    request_id: int,
    positions: Numbers = None,
    phases: "str | Iterable[str] | None" = None,
    steps: Numbers = None,
    own_fingerprint: bool = False,
    include_special: bool = False,
) -> Intervention:
    """Returns an Intervention that adds `strength` times the decoder's row of a feature to the states that the
    dictionary decodes; a transcoder's are those of the hook point that it predicts.

    include_special: also at special tokens and the first position, where no dictionary was trained by default.
    strength: in units of the feature's activation, for a dictionary that does not scale states. Negative: against it.
    Source: SAELens' tutorial on steering: the decoder's row times a coefficient, added to the residual stream.
    Raises: DictionaryError for an unknown feature, and if the hook point is not S, T, C or the input of a block.
    """
    site, layer = _place(dictionary, dictionary.config.place_out)
    vector = number("strength", strength) * dictionary.direction(whole_number("feature", feature)).cpu()
    return Intervention(
        name="steer_feature", action="add", vectors=vector,
        request_id=request_id, site=site, layer=layer, positions=positions, phases=phases, steps=steps,
        own_fingerprint=own_fingerprint, include_special=include_special,
    )  # fmt: skip


def ablate_feature(
    dictionary: Dictionary,
    feature: int,
    *,
    request_id: int,
    positions: Numbers = None,
    phases: "str | Iterable[str] | None" = None,
    steps: Numbers = None,
    own_fingerprint: bool = False,
    include_special: bool = False,
) -> Intervention:
    """Returns an Intervention that removes one feature from the states: each loses the feature's activation in it,
    times the decoder's row. A state in which the feature is not active keeps its bits.

    The rest of the state stays, also what the dictionary does not reconstruct.
    include_special: as in `steer_feature`.
    Raises: DictionaryError for an unknown feature, a transcoder, and a hook point that is not S, T, C or the input of a
    block.
    Twin: tests.twins.features_slowly.ablated_slowly, close(1e-5) in float32.
    """
    site, layer = _place(dictionary, dictionary.config.place)
    dictionary.part_of(torch.zeros(0, dictionary.config.d_in), whole_number("feature", feature))  # raises errors early
    return FeatureChange(
        name="ablate_feature", action="function", vectors=torch.zeros(1, 1), dictionary=dictionary,
        feature=int(feature), request_id=request_id, site=site, layer=layer, positions=positions, phases=phases,
        steps=steps, own_fingerprint=own_fingerprint, include_special=include_special,
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
