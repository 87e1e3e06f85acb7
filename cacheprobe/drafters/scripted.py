"""Drafts tokens from a user's function: for experiments with a chosen draft, and for adversarial tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.core.values import whole_number
from cacheprobe.drafters.base import DEADLINE_SECONDS, DraftContext
from cacheprobe.kvcache.sequence import SequenceState
from cacheprobe.models.base import CachedLM

Script = Callable[[SequenceState], Sequence[int]]


@register("drafters", "scripted")
@dataclass(frozen=True)
class Scripted:
    """Drafts `script(state)`, of any length; the engine cuts the draft to what one pass can hold."""

    script: Script
    deadline_seconds: float | None = field(default=DEADLINE_SECONDS, repr=False, compare=False)
    """Limit for one call of the script; see `drafters.base.deadline_seconds`."""
    name: ClassVar[str] = "scripted"
    drafted_layers: ClassVar[int] = 0

    def check(self, model: CachedLM) -> None:
        """Accepts every model: the engine checks each token when it arrives."""

    def release(self, state: SequenceState) -> None:
        """Does nothing: no state is stored for a request."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns the script's tokens for each request; [] if a draft is already open."""
        return [
            [] if state.draft else [whole_number("a token", token) for token in self.script(state)] for state in states
        ]
