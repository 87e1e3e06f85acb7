"""A drafter that says what it is told: for experiments with a chosen draft, and for hostile ones."""

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
    """Drafts `script(state)`: as many tokens as it likes, cut by the engine to what one pass can hold."""

    script: Script
    deadline_seconds: float | None = field(default=DEADLINE_SECONDS, repr=False, compare=False)
    """For one call of the script's; see `drafters.base.deadline_seconds`."""
    name: ClassVar[str] = "scripted"
    drafted_layers: ClassVar[int] = 0

    def check(self, model: CachedLM) -> None:
        """Tokens are checked as they come: the vocabulary's size is the engine's to know."""

    def release(self, state: SequenceState) -> None:
        """Nothing is kept for a request."""

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        return [
            [] if state.draft else [whole_number("a token", token) for token in self.script(state)] for state in states
        ]
