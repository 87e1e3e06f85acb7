"""Makes the logits and drafts of a run whose passes are counted and not computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cacheprobe.engine.drafters.base import DraftContext, Drafter, drafted_layers
from cacheprobe.engine.drafters.model import DraftModel
from cacheprobe.engine.estimates.tally import RunTally
from cacheprobe.engine.passes import Entry
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM

ACCEPTED, REJECTED = 0, 1
"""Token ids of the counted run: the verifier always chooses the first; a rejected draft token is the second."""
WHOLE = 10**6
"""Number of tokens of a draft that is as long as the engine allows, or is accepted to its end."""
ALL_ACCEPTED, ALL_REJECTED = ((WHOLE, WHOLE),), ((WHOLE, 0),)
"""Outcomes of drafts for `count`."""


class DraftOutcomes:
    """Makes the logits of two tokens, so that drafts are accepted as far as earlier drafts were.

    outcomes: (length of a draft, number of accepted tokens) of each, of which every new draft takes one.
    """

    def __init__(self, outcomes: Sequence[tuple[int, int]]) -> None:
        self._outcomes = outcomes
        self._rows = torch.eye(2)

    def outcome(self, state: SequenceState) -> tuple[int, int]:
        """Returns (length, number of accepted tokens) of the draft that a request begins at its last commit."""
        return self._outcomes[(7_919 * state.request_id + state.last_committed_position) % len(self._outcomes)]

    def drafted(self, state: SequenceState, position: int) -> int:
        """Returns the draft token that follows a position of a request."""
        _, num_accepted = self.outcome(state)
        return ACCEPTED if position - state.last_committed_position < num_accepted else REJECTED

    def length(self, state: SequenceState) -> int:
        """Returns the largest number of tokens that a drafter without passes drafts for a request."""
        return self.outcome(state)[0]

    def of(self, phase: str, entries: Sequence[Entry], num_logits: int, slots: Sequence[int] | None) -> Tensor:
        """Returns logits [b, n, 2], which choose the accepted token in prefill and verify passes."""
        if phase != "decode":
            return self._rows[ACCEPTED].expand(len(entries), num_logits, 2)
        return self._rows[[self.drafted(entry.state, entry.start) for entry in entries]][:, None]


class RollingLogits:
    """Makes logits of the model's vocabulary, which choose another token at each position."""

    def __init__(self, d_vocab: int, seed: int = 0) -> None:
        self.d_vocab = d_vocab
        self._distinct = min(d_vocab, 256)
        self._order = torch.randperm(d_vocab, generator=torch.Generator().manual_seed(seed))

    def of(self, phase: str, entries: Sequence[Entry], num_logits: int, slots: Sequence[int] | None) -> Tensor:
        """Returns logits [b, n, v] whose largest is that of a token drawn by position and request."""
        out = torch.zeros(len(entries), num_logits, self.d_vocab)
        for b, entry in enumerate(entries):
            for n, slot in enumerate(range(num_logits) if slots is None else slots):
                out[b, n, self.drafted(entry.state, entry.start + slot)] = 9.0
        return out

    def drafted(self, state: SequenceState, position: int) -> int:
        """Returns the token that follows a position of a request, in drafts and in the verifier's choice alike."""
        return int(self._order[(position + 7 * state.request_id) % self._distinct])

    def length(self, state: SequenceState) -> int:
        """Returns the largest number of tokens that a drafter without passes drafts for a request."""
        return state.num_left


@dataclass
class AssumedDrafter:
    """Drafts as many tokens as another drafter can, by the same passes."""

    drafter: Drafter
    model: CachedLM
    logits: DraftOutcomes | RollingLogits
    tally: RunTally
    name: ClassVar[str] = "assumed"

    def __post_init__(self) -> None:
        self.num_layers = drafted_layers(self.drafter, self.model)

    def check(self, model: CachedLM) -> None:
        """Accepts every model; the drafter itself was checked before."""

    def release(self, state: SequenceState) -> None:
        """Does nothing: this drafter stores no data for a request."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns one draft token for each request after a decode pass; if the drafter runs no layer of the model, a
        whole draft for each request without one.
        """
        lengths = dict.fromkeys(states, 1)
        if self.num_layers:
            whole = self.num_layers == self.model.n_layers
            context.feed_newest(states, None if whole else self.num_layers)
        else:
            longest = getattr(self.drafter, "length", None) or self.model.n_ctx
            for state in states:
                most = min(longest, state.num_left - 1, self.logits.length(state))
                lengths[state] = 0 if state.draft else most
        if drafting := [state for state in states if lengths[state]]:
            self.tally.draft_calls[len(drafting)] += max(lengths.values())
        if self.num_layers or isinstance(self.drafter, DraftModel):  # they choose each token from logits
            self.tally.choices += sum(lengths.values())
        return [
            [self.logits.drafted(state, state.newest[1] + k) for k in range(length)]
            for state, length in lengths.items()
        ]
