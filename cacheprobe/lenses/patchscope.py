"""Defines Patchscope, a lens that inserts a state into another prompt and reads what the model says next."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cacheprobe.core.live import ModelError
from cacheprobe.core.registry import register
from cacheprobe.core.values import whole_number
from cacheprobe.lenses.base import LensError, said
from cacheprobe.lenses.insertion import IDENTITY_PROMPT, LinearMap, TargetPrompt, inserted, mapped
from cacheprobe.models.base import CachedLM
from cacheprobe.models.paths import usable
from cacheprobe.models.prompts import as_token_ids

IDENTITY_IDS = (0, 0, 1, 1, 2)
"""The identity prompt of a model without a tokenizer: two tokens that are repeated, and one that is not."""


@register("lenses", "patchscope")
@dataclass(frozen=True, eq=False)
class Patchscope:
    """Reads a state by inserting it into a prompt, in place of the state of the prompt's last token. The reading is
    what the model predicts next.

    The default prompt repeats words, so that it says little of its own; section 4.1 of the paper estimates with it what
    the model will predict. A state of the last layer gives the model's own output, as with every lens. Each state costs
    a forward pass of one token.
    Source: Ghandeharioun et al. 2024 (arXiv 2401.06102), sections 3 and 4.1 (the token identity prompt).
    Twin: tests.twins.lenses_slowly.inserted_slowly, a state alone in a plain forward, close(1e-5) in float32.
    """

    prompt: "str | tuple[int, ...]" = IDENTITY_PROMPT
    """The prompt, as text or token ids; states are inserted at its last token."""
    target_layer: int | None = None
    """The layer after which states of all layers but the last are inserted; None for each state's own layer."""
    linear_map: "LinearMap | None" = None
    """Applied to states of all layers but the last before they are inserted: a function of states [n, m], a matrix
    [m, m], or nn.Linear."""
    name: ClassVar[str] = "patchscope"
    sites: ClassVar[tuple[str, ...]] = ("S",)

    def __repr__(self) -> str:
        """Returns the settings as text; of the map, its SHA-256."""
        about = "" if self.linear_map is None else f", linear_map={said(self.linear_map)}"
        return f"Patchscope(prompt={self.prompt!r}, target_layer={self.target_layer}{about})"

    @classmethod
    def fresh(cls, model: CachedLM) -> "Patchscope":
        """Returns a Patchscope with the default prompt, which needs no training."""
        return cls() if model.tokenizer is not None else cls(IDENTITY_IDS)

    def check(self, model: CachedLM) -> None:
        """Raises: LensError if the model cannot be patched or cannot read the prompt, lacks the target layer, or has
        states of another width than the linear map."""
        self._token_ids(model)
        self._mapped(model, torch.zeros(1, model.d_model, device=model.device))
        if self.target_layer is None:
            return
        if not 0 <= whole_number("target_layer of the patchscope lens", self.target_layer) < model.n_layers:
            raise LensError(
                f"target_layer={self.target_layer} of the patchscope lens: {model.name} has layers 0 to "
                f"{model.n_layers - 1}"
            )

    @torch.inference_mode()
    def logits(self, model: CachedLM, states: Float[Tensor, "n m"], layers: Int[Tensor, "n"]) -> Float[Tensor, "n v"]:
        """Returns logits [n, v] of residual streams `states` [n, m], each taken after its layer in `layers` [n]."""
        ids, last = self._token_ids(model), model.n_layers - 1
        at = layers if self.target_layer is None else torch.where(layers == last, layers, self.target_layer)
        target = TargetPrompt.of(usable(model, "auto"), ids, len(ids) - 1)
        if self.linear_map is not None:
            is_last = (layers == last).to(states.device)[:, None]
            states = torch.where(is_last, states, self._mapped(model, states).to(states))
        chosen, source = _without_repeated_zeros(states, at)
        last_residuals = torch.empty_like(states[chosen])
        for places, found in inserted(target, states[chosen], at[chosen]):
            last_residuals[places.to(states.device)] = found
        return model.read_out(last_residuals[source])

    def _mapped(self, model: CachedLM, states: Tensor) -> Tensor:
        """Returns the states [n, m] after the linear map. Raises: LensError if it does not fit them."""
        try:
            return mapped(states, self.linear_map, model, "the states")
        except ValueError as error:
            raise LensError(f"the patchscope lens: {error}") from error

    def _token_ids(self, model: CachedLM) -> tuple[int, ...]:
        """Returns the token ids of the prompt. Raises: LensError, see `check`."""
        try:
            usable(model, "auto")
            return as_token_ids(model, self.prompt, "target")
        except (ModelError, ValueError) as error:
            raise LensError(f"the patchscope lens cannot read {model.name}: {error}") from error


def _without_repeated_zeros(states: Tensor, layers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (indices of the states to insert, for each state [n] its place among these indices). Of the zero states
    of one layer, which fill up a tile, one is inserted."""
    numbers = torch.arange(len(states), device=states.device)
    keys = torch.where(states.any(-1), layers.max() + 1 + numbers, layers) if len(states) else layers
    distinct, source = keys.unique(return_inverse=True)
    chosen = torch.full_like(distinct, len(states)).scatter_reduce(0, source, numbers, "amin")
    return chosen, source
