"""Defines Medusa, a drafter that runs published Medusa heads: each drafts one of the next tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from cacheprobe.core.registry import register
from cacheprobe.core.values import folder as checked_folder
from cacheprobe.engine.drafters.base import DraftContext
from cacheprobe.engine.drafters.blocks import BlockDrafter, Recorded
from cacheprobe.engine.drafters.chain import require_finite
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.lm import DraftHeadLM
from cacheprobe.models.heads.medusa import MedusaLM, load_medusa


@register("drafters", "medusa")
@dataclass(frozen=True, eq=False)
class Medusa(BlockDrafter):
    """Drafts with Medusa heads, all of which read the model's last state: that of the token before the newest one,
    whose own state does not exist yet.

    Drafts are a chain of each head's choice, not the paper's tree. A head is fed no token: its rows have the newest
    committed one.
    Source: Medusa, Cai et al. 2024 (arXiv 2401.10774).
    Twin: tests.twins.block_heads_slowly.medusa_logits, == first choices in float32.
    """

    folder: "str | Path"
    """Folder of the heads, in Medusa's own layout or vLLM's; see `models.heads.medusa.load_medusa`."""
    name: ClassVar[str] = "medusa"

    def bind(self, model: CachedLM) -> DraftHeadLM:
        """Returns the heads in the folder, for this model. Raises: ValueError if they do not fit the model."""
        return load_medusa(checked_folder("folder of Medusa", self.folder), model)

    def read_block(self, context: DraftContext, head: DraftHeadLM, states: Sequence[SequenceState]) -> Tensor:
        """Returns logits [b, k, v] of the k heads."""
        assert isinstance(head, MedusaLM)
        newest = [(state, state.last_committed_position) for state in states]
        given = torch.cat([context.target_states(state, position - 1, position) for state, position in newest])
        rows = self.rows(head, states, Recorded(0, head.num_heads, None))
        with context.recording(rows, (len(states), head.num_heads)):
            residual = head.run(given)
            require_finite(head, [residual])
        return head.read_out(residual.flatten(0, 1)).unflatten(0, residual.shape[:2])

    def _room(self, head: DraftHeadLM, state: SequenceState, num_drafted: int) -> int:
        """Returns how many tokens may still be added to a request's draft; none if 0 or less."""
        assert isinstance(head, MedusaLM)
        return min(super()._room(head, state, num_drafted), head.num_heads - num_drafted)
