"""Defines Scripted, a drafter that drafts the tokens returned by a user's function: for experiments and tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cacheprobe.core.registry import register
from cacheprobe.core.values import whole_number
from cacheprobe.engine.drafters.base import DraftContext, Drafter
from cacheprobe.kvcache.sequence import SequenceState

Script = Callable[[SequenceState], Sequence[int]]


@register("drafters", "scripted")
@dataclass(frozen=True)
class Scripted(Drafter):
    """Drafts the token ids that the user's function `script(state)` returns. The engine cuts long drafts."""

    script: Script
    name: ClassVar[str] = "scripted"
    drafted_layers: ClassVar[int] = 0

    def extend(self, context: DraftContext, states: Sequence[SequenceState]) -> list[list[int]]:
        """Returns a list of the script's token ids for each request; [] if the request already has a draft."""
        return [
            [] if state.draft else [whole_number("a token", token) for token in self.script(state)] for state in states
        ]
