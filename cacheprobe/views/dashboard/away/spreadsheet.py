"""Writes a table as CSV that a spreadsheet shows as text, without computing any of it."""

from io import BytesIO

import pandas as pd

from cacheprobe.core.export import write_csv

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First letters of a cell that a spreadsheet would compute."""


def csv_text(table: pd.DataFrame) -> str:
    """Returns a table as CSV, as `write_csv` writes it: a head, and one line for each line of the table. A text that
    begins like a formula gets an apostrophe before it."""
    file = BytesIO()
    write_csv(table.map(_cell).rename(columns=_cell), file)
    return file.getvalue().decode()


def _cell(value: object) -> object:
    """Returns a value as it is written to a cell."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
