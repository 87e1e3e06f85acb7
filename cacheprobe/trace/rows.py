"""The records that a trace's tables of rows and of the ledger are made of."""

from dataclasses import dataclass


@dataclass(slots=True)
class RowRecord:
    """One row of one pass: a token, where it stood, and what became of it."""

    request_id: int
    step: int
    phase: str
    position: int
    token_id: int
    num_layers: int
    state_index: int
    """Place among the stored vectors, -1 where a filter dropped it."""
    role: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class LedgerChange:
    """Cache rows start..end-1 of a request took this provenance in this step."""

    request_id: int
    step: int
    start: int
    end: int
    provenance: str
