"""Defines Source: what is recorded part by part, a run or an import."""

from typing import TYPE_CHECKING, Any

from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.models.hf.text import TokenText
from cacheprobe.trace.tables.build import Part

if TYPE_CHECKING:
    from cacheprobe.trace.recording.lens_reader import LensReader


class Source:
    """Gives what was recorded, part by part."""

    model: Any
    """The CachedLM that runs; None for an import without a model."""
    reader: "LensReader | None" = None
    """The lens reader; None if no lens reads."""
    answer_mass: dict[int, tuple[float, ...]]
    """By request id: the probability of the first token of each answer."""
    texts: "CachedLM | TokenText"
    """Gives texts of token ids, with `token_texts` and `decode`."""

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of what the next call of `take` returns."""
        return 0

    def take(self) -> Part:
        """Returns what was recorded since the last call, and forgets it."""
        raise NotImplementedError

    def so_far(self) -> JsonDict:
        """Returns what a line of the journal says of the whole run so far: num_rows, num_states, preemptions,
        self_checks and checks."""
        raise NotImplementedError
