"""Drafts with ordinary batched decode steps, which are not batch-invariant."""

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
    """Drafts with all layers, batched with every other request: almost always right, but not batch-invariant.

    Source: LLM-42 (arXiv 2601.17768), section 4.2: the decode of a deterministic request is its draft.
    """

    name: ClassVar[str] = "fast_path"

    def check(self, model: CachedLM) -> None:
        """Accepts every model."""

    def release(self, state: SequenceState) -> None:
        """Does nothing: no state is stored for a request."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns one draft token for each request, from one decode step."""
        logits = context.feed_newest(states)
        return [[context.choose(state, row)] for state, row in zip(states, logits, strict=True)]
