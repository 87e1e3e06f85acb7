"""Defines the records that become a trace's tables of rows and of the ledger."""

from dataclasses import dataclass


@dataclass(slots=True)
class RowRecord:
    """One token of one pass: its position, and later its role and status."""

    request_id: int
    step: int
    phase: str
    position: int
    token_id: int
    num_layers: int
    state_index: int
    """Index among the stored vectors; -1 if a filter dropped the row."""
    role: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """Change of the provenance of cache rows start..end-1 of a request in one step."""

    request_id: int
    step: int
    start: int
    end: int
    provenance: str
