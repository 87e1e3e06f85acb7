"""Writes a table as CSV that a spreadsheet shows as text, without computing any of it."""

import json

import numpy as np
import pandas as pd

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First letters of a cell that a spreadsheet would compute."""


def csv_text(table: pd.DataFrame) -> str:
    """Returns a table as CSV: a head, and one line for each line of the table. A list becomes JSON; a text that begins
    like a formula gets an apostrophe before it; a missing value is empty."""
    return table.map(_cell).rename(columns=_cell).to_csv(index=False, lineterminator="\n")


def _cell(value: object) -> object:
    """Returns a value as it is written to a cell."""
    if isinstance(value, list | tuple | dict | np.ndarray):
        value = json.dumps(value, ensure_ascii=False, default=_plain)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _plain(value: object) -> object:
    """Returns a value of numpy as one that JSON has. Raises: TypeError for any other value."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"no JSON of {type(value).__name__}")
