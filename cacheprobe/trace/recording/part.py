"""Defines what a recorder may still discard (Unconfirmed), and what a DiskWriter needs of it (Source)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cacheprobe.core.records import Thought
from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.recording.features import FoundFeatures
from cacheprobe.trace.recording.kept_states import PassStates
from cacheprobe.trace.recording.lens_reader import LensReader, Queued
from cacheprobe.trace.tables.build import Part, RowRecord


@dataclass
class PassRows:
    """Holds what was recorded of one pass, or copied from a pass for a request with the same prompt."""

    rows: list[RowRecord] = field(default_factory=list)
    states: PassStates | None = None
    reads: dict[int, Queued] = field(default_factory=dict)
    """What the lens is to read, by index in `rows`; without the number of the row."""
    features: FoundFeatures | None = None
    copied: dict[int, int] = field(default_factory=dict)
    """By index in `rows`: the number of the row whose features it shares."""


@dataclass
class Unconfirmed:
    """Holds what was recorded since the rows were last confirmed: at each commit and at the end of each step. If a pass
    fails before, all of it is discarded."""

    passes: list[PassRows] = field(default_factory=list)
    thoughts: list[Thought] = field(default_factory=list)
    masses: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """New entries of `Recorder.answer_mass`."""


@runtime_checkable
class Source(Protocol):
    """Lists what a DiskWriter needs: of the Recorder of a run, or of an import."""

    @property
    def model(self) -> CachedLM | None:
        """The model that runs; None for an import without a model."""
        ...

    @property
    def reader(self) -> LensReader | None:
        """The lens reader; None if no lens reads."""
        ...

    @property
    def answer_mass(self) -> Mapping[int, tuple[float, ...]]:
        """By request id: the probability of the first token of each answer."""
        ...

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of what the next call of `take` returns."""
        ...

    def take(self) -> Part:
        """Returns what was recorded since the last call, and forgets it."""
        ...

    def so_far(self) -> JsonDict:
        """Returns what a line of the journal says of the whole run so far: num_rows, num_states, preemptions,
        self_checks and checks."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token id."""
        ...

    def decode(self, token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Returns the joint text of token ids, as it stands after the tokens `after`."""
        ...
