"""Defines ChainDrafter, the base class of drafters with a head that reads the verified model's states."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cacheprobe.core.devices import upload
from cacheprobe.core.records import RowSlot
from cacheprobe.core.values import whole_number
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.own_cache import OwnCache
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM
from cacheprobe.models.heads.lm import DraftHeadLM, HeadLM

_FEED_WIDTH = 64
"""Maximum number of rows of one request in a pass of the head. Longer texts take several passes."""


@dataclass(frozen=True, eq=False)
class ChainDrafter(Drafter, ABC):
    """Drafts token by token with a draft head, for all requests in one batch.

    The head's cache holds rows of committed tokens alone, each made from the verified model's state: at every draft the
    rows of the tokens committed since are added. The rows of a chain, made from the head's own states, stand behind
    them, and the next draft overwrites them.
    Twin: tests.drafters.test_heads: a head that never saw a rejected token, bitwise.
    """

    length: int = field(default=4, kw_only=True)
    """Maximum number of tokens in a draft; the engine's window and draft_length may set a lower limit."""
    drafted_layers: ClassVar[int] = 0
    always_drafts: ClassVar[bool] = False
    _heads: "WeakKeyDictionary[CachedLM, DraftHeadLM]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )
    _fed: "WeakKeyDictionary[SequenceState, int]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )
    """Number of rows of committed tokens in the head's cache, by request."""
    _own: "WeakKeyDictionary[HeadLM, OwnCache]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if whole_number(f"length of {type(self).__name__}", self.length) < 1:
            raise ValueError(f"{type(self).__name__}(length={self.length}) would draft nothing; give at least 1")

    @abstractmethod
    def bind(self, model: CachedLM) -> DraftHeadLM:
        """Returns the head for this model. Called once for each model. Raises: ValueError if it does not fit."""

    def head(self, model: CachedLM) -> DraftHeadLM:
        """Returns the head for this model, whose passes a run records."""
        if model not in self._heads:
            self._heads[model] = self.bind(model)
        return self._heads[model]

    def check(self, model: CachedLM) -> None:
        """Raises: ValueError if the head does not fit the model."""
        self.head(model)

    def release(self, state: SequenceState) -> None:
        """Frees a request's row of the head's cache."""
        self._fed.pop(state, None)
        for own in self._own.values():
            own.forget(state)

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of up to `length` draft tokens for each request; [] if the request already has a draft."""
        proposals: dict[SequenceState, list[int]] = {state: [] for state in states}
        head = self.head(context.model)
        drafting = [state for state in states if not state.draft and self._room(head, state, 0) > 0]
        if not drafting:
            return list(proposals.values())
        assert isinstance(head, HeadLM)
        own = self._own.setdefault(head, OwnCache())
        own.make_room(head, drafting, max(len(state.token_ids) for state in drafting) + max(_FEED_WIDTH, self.length))
        newest = self._catch_up(context, head, own, drafting)
        while True:
            chosen = context.choose(drafting, head.read_out(newest), [proposals[state] for state in drafting])
            for state, token_id in zip(drafting, chosen, strict=True):
                proposals[state].append(token_id)
            going_on = [i for i, state in enumerate(drafting) if self._goes_on(head, state, proposals[state])]
            if not going_on:
                return list(proposals.values())
            drafting = [drafting[i] for i in going_on]
            if len(going_on) < len(newest):
                newest = newest[upload(newest.device, [torch.tensor(going_on)])[0]]
            newest = self._step(context, head, own, newest, {state: proposals[state] for state in drafting})

    def _catch_up(self, context: DraftContext, head: HeadLM, own: OwnCache, states: Sequence[SequenceState]) -> Tensor:
        """Adds the rows of the tokens committed since the last draft. Returns the head's residual stream [b, m] at each
        request's newest committed token."""
        newest: dict[SequenceState, Tensor] = {}
        for part in self._unfed(states, own.cache.capacity):
            width = max(end - start for start, end in part.values())
            token_ids = torch.zeros(len(part), width, dtype=torch.long)
            given = torch.zeros(len(part), width, head.d_model, dtype=head.dtype, device=head.device)
            rows = []
            for b, (state, (start, end)) in enumerate(part.items()):
                tokens = state.token_ids[start + 1 : end + 1]
                token_ids[b, : len(tokens)] = torch.tensor(tokens)
                given[b, : len(tokens)] = head.entering(context.target_states(state, start, end))
                numbered = enumerate(tokens)
                rows += [RowSlot(state.request_id, b, t, start + 1 + t, token, True) for t, token in numbered]
            with context.recording(rows, (len(part), width)):
                cache_rows, starts = [own.row_of(state) for state in part], [start for start, _ in part.values()]
                residual = head.run(token_ids, given, own.cache, cache_rows, starts)
                require_finite(head, [residual[b, : end - start] for b, (start, end) in enumerate(part.values())])
            for b, (state, (start, end)) in enumerate(part.items()):
                self._fed[state] = end
                newest[state] = residual[b, end - start - 1]
        return torch.stack([newest[state] for state in states])

    def _unfed(self, states: Sequence[SequenceState], capacity: int) -> Iterator[dict[SequenceState, tuple[int, int]]]:
        """Yields the head's passes: a dict from request to (first cache slot, slot after the last). The caller must
        count the slots in `_fed` before the next one. capacity: slots of a row, which pads do not leave."""
        while True:
            left = {state: (self._fed.get(state, 0), state.last_committed_position) for state in states}
            part = {state: span for state, span in left.items() if span[0] < span[1]}
            if not part:
                return
            width = min(_FEED_WIDTH, *(capacity - start for start, _ in part.values()))
            yield {state: (start, min(end, start + width)) for state, (start, end) in part.items()}

    def _step(
        self,
        context: DraftContext,
        head: HeadLM,
        own: OwnCache,
        residual: Tensor,
        drafted: dict[SequenceState, list[int]],
    ) -> Tensor:
        """Runs the next row of each chain: the head's own state and the newest draft token. Returns the residual stream
        [b, m]."""
        newest = [tokens[-1] for tokens in drafted.values()]
        starts = [self._fed[state] + len(tokens) - 1 for state, tokens in drafted.items()]
        rows = [
            RowSlot(state.request_id, b, 0, start + 1, token, False, True)
            for b, (state, start, token) in enumerate(zip(drafted, starts, newest, strict=True))
        ]
        (token_ids,) = upload(head.device, [torch.tensor(newest)[:, None]])
        with context.recording(rows, (len(rows), 1)):
            cache_rows = [own.row_of(state) for state in drafted]
            residual = head.run(token_ids, head.fed_back(residual)[:, None], own.cache, cache_rows, starts)[:, 0]
            require_finite(head, [residual])
        return residual

    def _goes_on(self, head: DraftHeadLM, state: SequenceState, drafted: Sequence[int]) -> bool:
        """Returns whether a token may follow those drafted."""
        ends = state.stop_rule.ends([*state.generated, *drafted])
        return self._room(head, state, len(drafted)) > 0 and not ends

    def _room(self, head: DraftHeadLM, state: SequenceState, num_drafted: int) -> int:
        """Returns how many tokens may still be added to a request's draft; none if 0 or less."""
        limit = min(self.length, state.num_left - 1, head.n_ctx - state.last_committed_position)
        return (limit if state.draft_cap is None else min(limit, state.draft_cap)) - num_drafted


def require_finite(head: DraftHeadLM, states: Sequence[Tensor]) -> None:
    """Raises: ValueError if the states of a pass of a head hold NaN or infinity. On a GPU, on which the host would wait
    for the pass, the choice of a token raises instead."""
    if head.device.type == "cpu" and not all(bool(one.isfinite().all()) for one in states):
        raise ValueError(f"the draft head {head.name} gives NaN or infinite states; check its weights, or load float32")
