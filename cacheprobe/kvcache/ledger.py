"""Keeps the provenance of every cache slot: free, prefill, decoded, provisional, verified or edited."""

import torch
from torch import Tensor

from cacheprobe.core.records import PROVENANCES

CODES = {name: code for code, name in enumerate(PROVENANCES)}


class CacheIntegrityError(RuntimeError):
    """Raised if the cache's lengths and its ledger contradict each other, if a call would break them, or if a slot
    holds a number that is not finite."""


class Ledger:
    """Holds the provenance code of each slot of each cache row, uint8 [rows, capacity]. The slots in use of a row have
    no hole."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.codes = torch.zeros(rows, capacity, dtype=torch.uint8)

    def mark(self, row: int, start: int, end: int, provenance: str) -> None:
        """Sets the provenance of slots start..end-1 of a cache row."""
        self.codes[row, start:end] = CODES[provenance]

    def names(self, row: int, length: int) -> list[str]:
        """Returns the provenance names of a cache row's first `length` slots, as a list."""
        return [PROVENANCES[code] for code in self.codes[row, :length].tolist()]

    def check(self, lengths: Tensor) -> None:
        """Checks the ledger against the length of each cache row. Raises: CacheIntegrityError unless exactly the slots
        below each length are in use."""
        used = self.codes != CODES["free"]
        expected = torch.arange(self.codes.shape[1]) < lengths[:, None]
        wrong = (used != expected).nonzero()
        if len(wrong):
            row, slot = wrong[0].tolist()
            raise CacheIntegrityError(
                f"cache row {row} has length {int(lengths[row])}, but its slot {slot} is "
                f"{PROVENANCES[int(self.codes[row, slot])]}"
            )
