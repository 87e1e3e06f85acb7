"""Defines what a recorder gives away at once (Part), and what it may still discard (Unconfirmed)."""

from dataclasses import dataclass, field

from torch import Tensor

from cacheprobe.capture.lens_reader import Queued
from cacheprobe.core.records import StepRecord, Thought
from cacheprobe.trace.rows import LedgerChange, RowRecord


@dataclass
class Part:
    """Holds what a recorder collected between two calls of `Recorder.take`."""

    first_row: int
    """Number of the first of `rows` in the rows table."""
    rows: list[RowRecord]
    """Rows; those fed a draft token without a verdict so far have no role and no status."""
    labelled: list[tuple[int, RowRecord]]
    """Rows of earlier parts, with their numbers, that got their role and status since."""
    states: dict[tuple[str, int], Tensor]
    """By (site, layer): states [n, m] of the kept rows; heads as in `HeadBlocks.joined`."""
    columns: dict[str, Tensor]
    """Lens readings, as from `LensReader.take`."""
    steps: list[StepRecord]
    ledger: list[LedgerChange]
    thoughts: list[Thought]


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
