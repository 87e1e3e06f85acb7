"""Provenance of every cache slot: free, prefill, decoded, provisional or verified."""

import torch
from torch import Tensor

from cacheprobe.core.records import PROVENANCES

CODES = {name: code for code, name in enumerate(PROVENANCES)}


class CacheIntegrityError(RuntimeError):
    """The cache's lengths and its ledger contradict each other, or a slot holds a number that is not finite."""


class Ledger:
    """Provenance codes [rows, capacity]. Rows are written contiguously, so the used part has no hole."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.codes = torch.zeros(rows, capacity, dtype=torch.uint8)

    def mark(self, row: int, start: int, end: int, provenance: str) -> None:
        """Sets the provenance of slots start..end-1 of a row."""
        self.codes[row, start:end] = CODES[provenance]

    def names(self, row: int, length: int) -> list[str]:
        """Returns the provenance names of a row's first `length` slots."""
        return [PROVENANCES[code] for code in self.codes[row, :length].tolist()]

    def check(self, lengths: Tensor) -> None:
        """Raises: CacheIntegrityError unless exactly the slots below each row's length are in use."""
        used = self.codes != CODES["free"]
        expected = torch.arange(self.codes.shape[1]) < lengths[:, None]
        wrong = (used != expected).nonzero()
        if len(wrong):
            row, slot = wrong[0].tolist()
            raise CacheIntegrityError(
                f"cache row {row} has length {int(lengths[row])}, but its slot {slot} is "
                f"{PROVENANCES[int(self.codes[row, slot])]}"
            )
