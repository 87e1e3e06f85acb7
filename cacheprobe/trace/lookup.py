"""Finds lines of a table by request or by row number, without scanning the whole table at every call."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import pandas as pd
import torch

from cacheprobe.trace.head_blocks import ragged_starts

_NO_LINES = np.empty(0, dtype=np.int64)


class Lookup:
    """Holds indices of one table, each built at its first use and kept until the table is replaced or changed.

    So reading every request of a run takes time in proportion to the run's lines, not to lines times requests.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[tuple[pd.Series, ...], Any]] = {}

    def lines_of(self, table: pd.DataFrame, request_id: SupportsIndex) -> pd.DataFrame:
        """Returns a copy of the table's lines of one request, in the table's order; no line for an unknown request."""
        by_request = self._index(table, "request", ("request_id",), lambda ids: pd.Series(ids).groupby(ids).indices)
        return table.iloc[by_request.get(request_id, _NO_LINES)]

    def places_of(self, rows: pd.DataFrame, row_numbers: Sequence[int]) -> np.ndarray:
        """Returns the place in the rows table of each row number, as an array. Raises: KeyError for an unknown row
        number."""
        places = self._index(rows, "row", ("row",), lambda numbers: pd.Series(np.arange(len(numbers)), index=numbers))
        if unknown := [row for row in row_numbers if row not in places.index]:
            raise KeyError(f"no row {unknown[0]} in this trace; it has rows 0 to {len(rows) - 1}")
        return places.loc[row_numbers].to_numpy()

    def pattern_starts(self, rows: pd.DataFrame, numel: int) -> tuple[torch.Tensor, int]:
        """Returns `ragged_starts` of a flat tensor of `numel` attention weights, whose rows are those of the rows table
        that have stored vectors."""

        def starts(state_index: np.ndarray, position: np.ndarray) -> tuple[torch.Tensor, int]:
            """Returns the starts, counting once each stored vector that several rows share (of a shared prompt)."""
            kept = state_index >= 0
            _, first = np.unique(state_index[kept], return_index=True)
            return ragged_starts(torch.tensor(position[kept][first]), numel)

        return self._index(rows, ("starts", numel), ("state_index", "position"), starts)

    def _index(self, table: pd.DataFrame, name: Any, columns: Sequence[str], build: Callable[..., Any]) -> Any:
        """Returns build(*columns as arrays), or what it returned before if the columns are the same and unchanged.

        pandas copies a column before a change in place if another Series refers to its memory, as `_known` does. So a
        column at the same address has the same values.
        """
        now = tuple(table[column] for column in columns)
        before, index = self._known.get(name, ((), None))
        if not before or not all(map(_is_same_memory, now, before)):
            index = build(*(column.to_numpy() for column in now))
            self._known[name] = now, index
        return index


def _is_same_memory(column: pd.Series, other: pd.Series) -> bool:
    """Returns True if two columns hold the same memory. False for columns that NumPy must copy, so that their index is
    built at every call."""
    a, b = column.to_numpy(), other.to_numpy()  # both alive, so that no copy takes the address of a freed one
    return a.ctypes.data == b.ctypes.data and len(a) == len(b)
