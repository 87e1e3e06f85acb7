"""Writes a table as CSV that a spreadsheet shows as text, without computing any of it."""

import pandas as pd

from cacheprobe.core.export import CSV, cell_text

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First letters of a cell that a spreadsheet would compute."""


def csv_text(table: pd.DataFrame) -> str:
    """Returns a table as CSV: a head, and one line for each line of the table. Texts are in quotes, and one that begins
    like a formula gets an apostrophe before it; a list becomes JSON; a missing value is empty."""
    return table.map(_cell).rename(columns=_cell).to_csv(index=False, **CSV)


def _cell(value: object) -> object:
    """Returns a value as it is written to a cell."""
    value = cell_text(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
