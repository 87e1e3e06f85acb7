"""Defines FastPath, a drafter that decodes all requests in one batch with the whole model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.engine.drafters.base import DraftContext
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM


@register("drafters", "fast_path")
@dataclass(frozen=True)
class FastPath:
    """Drafts one token a pass with all layers, for all drafting requests in one batch.

    The drafts' logits are not batch-invariant: other requests may change the last bits.

    Source: LLM-42 (arXiv 2601.17768), section 4.2: the decode of a deterministic request is its draft.
    """

    name: ClassVar[str] = "fast_path"

    def check(self, model: CachedLM) -> None:
        """Accepts every model, without a check."""

    def release(self, state: SequenceState) -> None:
        """Does nothing: this drafter stores no data for a request."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns [[token id], ...]: for each request one draft token, from one decode pass of the whole model."""
        logits = context.feed_newest(states)
        return [[context.choose(state, row)] for state, row in zip(states, logits, strict=True)]
