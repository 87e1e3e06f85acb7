"""Tables as records that JSON can hold."""

from typing import Any

import pandas as pd

DIGITS = 4


def records_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A line each, numbers rounded to four digits behind the point, None where nothing is known."""
    rounded = table.round(DIGITS).astype(object)
    return rounded.where(rounded.notna(), None).to_dict("records")
