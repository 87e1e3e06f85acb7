"""Results as JSON and as Markdown: records, files that are written whole, tables, and the marked parts of a page."""

from collections.abc import Iterable, Mapping, Sequence
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


def fill_page(text: str, script: str, parts: Mapping[str, str]) -> str:
    """Returns a page with each part in place of what stood between its two marks, which name the part and the script.

    The marks are the lines `<!-- PART: written by scripts/SCRIPT -->` and `<!-- end of PART -->`.
    """
    for name, part in parts.items():
        begin, end = f"<!-- {name}: written by scripts/{script} -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"
    return text
