"""Values with their 95 % intervals: as error bars, and in words for the pointer."""

from typing import Any

import pandas as pd


def error_bars(table: pd.DataFrame, value: str) -> dict[str, Any]:
    """Thin bars from the columns low to high around `value`."""
    return dict(
        type="data", symmetric=False, array=(table.high - table[value]).tolist(),
        arrayminus=(table[value] - table.low).tolist(), thickness=1, width=0,
    )  # fmt: skip


def told(table: pd.DataFrame, value: str, style: str, **counts: str) -> list[str]:
    """For each line: the value, its interval, and how many it is over, as far as the table says so.

    style: a format, such as .1%.  counts: what a column counts, by its name.
    """
    out = []
    for line in table.to_dict("records"):
        said = f"{line[value]:{style}}, 95 % {line['low']:{style}} to {line['high']:{style}}"
        over = [f"{line[column]} {what}" for column, what in counts.items() if column in line]
        out.append(f"{said}<br>{', '.join(over)}" if over else said)
    return out
