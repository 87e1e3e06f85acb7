"""Defines BlockDrafter, the base class of drafters whose head drafts several tokens in one pass."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cacheprobe.core.devices import upload
from cacheprobe.core.records import RowSlot
from cacheprobe.engine.drafters.base import DraftContext
from cacheprobe.engine.drafters.chain import ChainDrafter
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.heads.lm import DraftHeadLM


class Recorded(NamedTuple):
    """Says which rows of a pass of a head are recorded: those from token slot `first` on, one for each draft token."""

    first: int
    width: int
    """Token slots of the pass."""
    token_id: int | None
    """Token that the rows are fed; None for the newest committed one."""


@dataclass(frozen=True, eq=False)
class BlockDrafter(ChainDrafter):
    """Drafts all tokens of a draft in one pass of a head, for all requests in one batch.

    A row that drafts the token of position p + 1 is recorded at position p, so that its reading is compared with this
    token. So the first one has the position of the newest committed token.
    """

    length: int = field(default=15, kw_only=True)
    """Maximum number of tokens in a draft; the head, the engine's window and draft_length may set a lower limit."""

    @abstractmethod
    def read_block(self, context: DraftContext, head: DraftHeadLM, states: Sequence[SequenceState]) -> Tensor:
        """Runs the head for these requests, inside `recording`. Returns logits [b, k, v] of the next k tokens of
        each."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of up to `length` draft tokens for each request; [] if the request already has a draft."""
        proposals: dict[SequenceState, list[int]] = {state: [] for state in states}
        head = self.head(context.model)
        drafting = [state for state in states if not state.draft and self._room(head, state, 0) > 0]
        if not drafting:
            return list(proposals.values())
        logits = self.read_block(context, head, drafting)
        going_on = list(range(len(drafting)))
        for number in range(logits.shape[1]):
            asked = [drafting[i] for i in going_on]
            of_asked = logits[upload(logits.device, [torch.tensor(going_on)])[0], number]
            chosen = context.choose(asked, of_asked, [proposals[state] for state in asked])
            for state, token_id in zip(asked, chosen, strict=True):
                proposals[state].append(token_id)
            going_on = [i for i in going_on if self._goes_on(head, drafting[i], proposals[drafting[i]])]
            if not going_on:
                break
        return list(proposals.values())

    def rows(self, head: DraftHeadLM, states: Sequence[SequenceState], recorded: Recorded) -> list[RowSlot]:
        """Returns the rows of a pass for `recording`, as many for each request as it may draft tokens."""
        found = []
        for b, state in enumerate(states):
            newest, token_id = state.last_committed_position, recorded.token_id
            token_id = state.token_ids[-1] if token_id is None else token_id
            for i in range(min(self._room(head, state, 0), recorded.width - recorded.first)):
                found.append(RowSlot(state.request_id, b, recorded.first + i, newest + i, token_id, i == 0, i > 0))
        return found
