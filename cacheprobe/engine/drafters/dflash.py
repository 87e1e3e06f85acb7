"""Defines DFlash, a drafter that runs a published DFlash head: a block of draft tokens in one pass."""

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
from cacheprobe.kvcache.own_cache import OwnCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.dflash import BlockHeadLM
from cacheprobe.models.heads.dflash_files import load_dflash
from cacheprobe.models.heads.lm import DraftHeadLM


@register("drafters", "dflash")
@dataclass(frozen=True, eq=False)
class DFlash(BlockDrafter):
    """Drafts a block of tokens in one pass of a DFlash head, which reads states of several layers of the model.

    The head's cache holds rows of committed positions alone, made from the model's states. The rows of a block stand
    behind them, and the next ones overwrite them. The block is always whole, also if fewer tokens are asked for.
    Source: DFlash, Chen et al. 2026 (arXiv 2602.06036).
    Twin: transformers' generate(speculation_type="dflash"), == drafts and committed tokens, greedy in float32.
    """

    folder: "str | Path"
    """Folder of the head, in the layout of z-lab, speculators or transformers; see `models.heads.dflash_files`."""
    name: ClassVar[str] = "dflash"

    def bind(self, model: CachedLM) -> BlockHeadLM:
        """Returns the head in the folder, for this model. Raises: ValueError if it does not fit the model."""
        return load_dflash(checked_folder("folder of DFlash", self.folder), model)

    def read_block(self, context: DraftContext, head: DraftHeadLM, states: Sequence[SequenceState]) -> Tensor:
        """Returns logits [b, B - 1, v] of the tokens after each request's newest one."""
        assert isinstance(head, BlockHeadLM)
        own = self._own.setdefault(head, OwnCache())
        own.make_room(head, states, max(len(state.token_ids) for state in states) + head.block_size)
        for part in self._unfed(states, own.cache.capacity):
            width = max(end - start for start, end in part.values())
            given = torch.zeros(len(part), width, head.d_model, dtype=head.dtype, device=head.device)
            for b, (state, (start, end)) in enumerate(part.items()):
                given[b, : end - start] = head.entering(context.target_states(state, start, end))
            head.feed(given, own.cache, [own.row_of(state) for state in part], [start for start, _ in part.values()])
            self._fed.update((state, end) for state, (_, end) in part.items())
        token_ids = head.block_tokens([state.token_ids[-1] for state in states])
        rows = self.rows(head, states, Recorded(1, head.block_size, head.mask_token_id))
        with context.recording(rows, (len(states), head.block_size)):
            places = [own.row_of(state) for state in states], [state.last_committed_position for state in states]
            residual = head.run_block(token_ids, own.cache, *places)[:, 1:]
            require_finite(head, [residual])
        return head.read_out(residual.flatten(0, 1)).unflatten(0, residual.shape[:2])

    def _room(self, head: DraftHeadLM, state: SequenceState, num_drafted: int) -> int:
        """Returns how many tokens may still be added to a request's draft; none if 0 or less, or if the context has no
        room for a whole block."""
        assert isinstance(head, BlockHeadLM)
        size = head.block_size
        most = size - 1 if state.last_committed_position + size <= head.n_ctx else 0
        return min(super()._room(head, state, num_drafted), most - num_drafted)
