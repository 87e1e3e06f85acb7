"""Results as JSON and as Markdown: records and tables."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

DIGITS = 4
RESULTS = Path(__file__).parents[1] / "results"
"""Where stored results are, in a checkout."""


def records_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """A line each, numbers rounded to four digits behind the point, None where nothing is known."""
    rounded = table.round(DIGITS).astype(object)
    return rounded.where(rounded.notna(), None).to_dict("records")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table with these column names."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
