"""The fast path itself as a drafter: one decode step of the whole batch, in whatever shape the traffic has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.drafters.base import DraftContext
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM


@register("drafters", "fast_path")
@dataclass(frozen=True)
class FastPath:
    """All layers, batched with every other request: right nearly always, and deterministic never.

    Source: LLM-42 (arXiv 2601.17768), section 4.2: the decode of a deterministic request is its draft.
    """

    name: ClassVar[str] = "fast_path"

    def check(self, model: CachedLM) -> None:
        """Every model has a fast path."""

    def release(self, state: SequenceState) -> None:
        """Nothing is kept for a request."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        logits = context.feed_newest(states)
        return [[context.choose(state, row)] for state, row in zip(states, logits, strict=True)]
