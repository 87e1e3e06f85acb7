"""Defines Replayed, a drafter for `cp.replay`: it drafts what another program drafted, or the forced tokens."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.core.values import JsonDict
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.sequence import SequenceState

Drafts = Mapping[int, Mapping[int, Sequence[int]]]


@register("drafters", "replayed")
@dataclass(frozen=True, repr=False)
class Replayed(Drafter):
    """Drafts the tokens that another program drafted. Without its drafts it drafts the request's forced tokens, all of
    which are accepted, so that one pass computes a window of tokens. Runs no model.
    """

    drafts: Drafts | None = None
    """By request id, and by the index of the first draft token among the generated tokens: the draft's token ids. None
    if they are not known."""
    name: ClassVar[str] = "replayed"
    drafted_layers: ClassVar[int] = 0

    def __repr__(self) -> str:
        if self.drafts is None:
            return "Replayed()"
        digest = hashlib.sha256(json.dumps(self.record()).encode()).hexdigest()
        return f"Replayed({sum(map(len, self.drafts.values()))} drafts, {digest[:12]})"

    def record(self) -> JsonDict | None:
        """Returns the drafts as JSON, for the run's metadata; None if they are not known."""
        if self.drafts is None:
            return None
        return {str(i): {str(at): list(ids) for at, ids in of.items()} for i, of in self.drafts.items()}

    @classmethod
    def from_record(cls, record: JsonDict | None) -> "Replayed":
        """Returns the drafter whose `record` this is."""
        if record is None:
            return cls()
        return cls({int(i): {int(at): tuple(ids) for at, ids in of.items()} for i, of in record.items()})

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of draft tokens for each request; [] if the request already has a draft, or if none is
        known."""
        return [[] if state.draft else self._draft(state) for state in states]

    def _draft(self, state: SequenceState) -> list[int]:
        """Returns the draft of one request that follows its committed tokens."""
        if self.drafts is None:
            return list(state.request.forced_token_ids[state.num_generated :])
        return list(self.drafts.get(state.request_id, {}).get(state.num_generated, ()))
