"""Defines the drafters that run the verified model: EarlyExit through some layers, FastPath through all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from cacheprobe.core.registry import register
from cacheprobe.core.values import whole_number
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.lenses.base import Lens, require_readable
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM


@register("drafters", "early_exit")
@dataclass(frozen=True)
class EarlyExit(Drafter):
    """Drafts one token a pass: runs the model through layer `layer`, and reads the residual stream there with a lens.

    Later layers are not computed. Their cache slots hold old values until the verify pass writes them.
    Source: self-speculation as in LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), without a trained exit.
    """

    layer: int
    """Index of the layer after which the model stops, 0 to n_layers - 2."""
    lens: Lens = field(default_factory=LogitLens)
    name: ClassVar[str] = "early_exit"
    always_drafts: ClassVar[bool] = False

    @property
    def drafted_layers(self) -> int:
        """Number of layers of the model that run for a draft token: layer + 1."""
        return self.layer + 1

    def check_layers(self, n_layers: int, name: str) -> None:
        """Raises: ValueError if `layer` is not one of 0 to n_layers - 2. name: the model's, for the message."""
        if not 0 <= whole_number("layer of early_exit", self.layer) < n_layers - 1:
            raise ValueError(
                f"unknown layer {self.layer} for EarlyExit; {name} can stop after 0 to {n_layers - 2}; "
                "FastPath drafts from the last layer"
            )

    def check(self, model: CachedLM) -> None:
        """Raises: ValueError unless `layer` is one of the model's layers but the last; LensError if the lens cannot
        read S of that layer."""
        self.check_layers(model.n_layers, model.name)
        require_readable(self.lens, model, "S", [self.layer])

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns [[token id], ...]: for each request one draft token, chosen from the lens's logits after `layer`."""
        residual = context.feed_newest(states, num_layers=self.layer + 1)
        layers = torch.full((len(states),), self.layer, device=residual.device)
        logits = self.lens.logits(context.model, residual, layers)
        return [[token_id] for token_id in context.choose(states, logits)]


@register("drafters", "fast_path")
@dataclass(frozen=True)
class FastPath(Drafter):
    """Drafts one token a pass with all layers, for all drafting requests in one batch.

    The drafts' logits are not batch-invariant: other requests may change the last bits.

    Source: LLM-42 (arXiv 2601.17768), section 4.2: the decode of a deterministic request is its draft.
    """

    name: ClassVar[str] = "fast_path"
    always_drafts: ClassVar[bool] = False

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns [[token id], ...]: for each request one draft token, from one decode pass of the whole model."""
        return [[token_id] for token_id in context.choose(states, context.feed_newest(states))]
