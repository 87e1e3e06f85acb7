"""Defines the records that become a trace's tables of rows and of cache changes."""

from dataclasses import dataclass


@dataclass(slots=True)
class RowRecord:
    """Holds one row of a trace: one token of one pass. Role and status are filled in later."""

    request_id: int
    step: int
    phase: str
    position: int
    token_id: int
    num_layers: int
    state_index: int = -1
    """Index among the stored vectors; -1 if a capture filter dropped the row, or may still drop it."""
    role: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """Holds one change in a request's cache row: in one step, slots start..end-1 got this provenance, such as
    "verified".
    """

    request_id: int
    step: int
    start: int
    end: int
    provenance: str
