"""Defines what a recorder may still discard (Unconfirmed), and what a DiskWriter needs of it (Source)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from cacheprobe.core.values import JsonDict
from cacheprobe.models.base import CachedLM
from cacheprobe.trace.recording.lens_reader import LensReader, Queued
from cacheprobe.trace.tables.build import Part, RowRecord


@dataclass
class Unconfirmed:
    """Holds data of the passes since the rows were last confirmed, so that `Recorder.on_failure` can discard these
    passes.

    Rows are confirmed at each commit and at the end of each step; `Recorder.on_failure` no longer discards them then.
    """

    first_row: int = 0
    """Number of confirmed rows in `Recorder.rows`; all later rows are unconfirmed."""
    first_thought: int = 0
    """Number of confirmed thoughts in `Recorder.thoughts`."""
    num_blocks: int = 0
    """Number of unconfirmed passes whose states were appended (`KeptStates.add`)."""
    reads: list[tuple[RowRecord, Queued]] = field(default_factory=list)
    """Rows, and their states for the lens, to queue once the step is confirmed."""
    masses: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Unconfirmed entries of `Recorder.answer_mass`."""


@runtime_checkable
class Source(Protocol):
    """Lists what a DiskWriter needs: of the Recorder of a run, or of an import."""

    num_taken: int
    """Number of rows that `take` has returned."""
    num_compared: int
    differences: list[str]
    preemptions: list[tuple[int, int]]

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

    @property
    def num_states(self) -> int:
        """Number of rows with states so far."""
        ...

    @property
    def checks(self) -> list[JsonDict]:
        """Results of the self-checks that have checked a row."""
        ...

    def take(self) -> Part:
        """Returns what was recorded since the last call, and forgets it."""
        ...

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the text of each token id."""
        ...

    def decode(self, token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Returns the joint text of token ids, as it stands after the tokens `after`."""
        ...
