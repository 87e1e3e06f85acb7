"""Drafts with an early layer of the model, read through a lens."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from cacheprobe.core.registry import register
from cacheprobe.core.values import whole_number
from cacheprobe.drafters.base import DraftContext
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.lenses.base import Lens, require_readable
from cacheprobe.lenses.logit import LogitLens
from cacheprobe.models.base import CachedLM


@register("drafters", "early_exit")
@dataclass(frozen=True)
class EarlyExit:
    """Stops after block `layer` and drafts the token that the lens reads there. Later blocks are not computed.

    The cache slots of later layers stay stale until the verifier writes them, which it does for every accepted token.
    Source: self-speculation as in LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), without its trained exit.
    """

    layer: int
    """Block after which the lens reads the draft, 0 to n_layers - 2."""
    lens: Lens = field(default_factory=LogitLens)
    name: ClassVar[str] = "early_exit"

    @property
    def drafted_layers(self) -> int:
        """Number of blocks that a draft runs through."""
        return self.layer + 1

    def check_layers(self, n_layers: int, name: str) -> None:
        """Raises: ValueError if a model of this name, with this number of layers, cannot stop after `layer`."""
        if not 0 <= whole_number("layer of early_exit", self.layer) < n_layers - 1:
            raise ValueError(
                f"unknown layer {self.layer} for EarlyExit; {name} can stop after 0 to {n_layers - 2}; "
                "FastPath drafts from the last layer"
            )

    def check(self, model: CachedLM) -> None:
        """Raises: ValueError if the model has no such layer; LensError if the lens cannot read it."""
        self.check_layers(model.n_layers, model.name)
        require_readable(self.lens, model, "S", [self.layer])

    def release(self, state: SequenceState) -> None:
        """Does nothing: no state is stored for a request."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns one draft token for each request, read after block `layer`."""
        residual = context.feed_newest(states, num_layers=self.layer + 1)
        layers = torch.full((len(states),), self.layer, device=residual.device)
        logits = self.lens.logits(context.model, residual, layers)
        return [[context.choose(state, row)] for state, row in zip(states, logits, strict=True)]
