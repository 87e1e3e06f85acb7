"""Formats values with their 95 % intervals, as error bars and as hover texts."""

import pandas as pd


def error_bars(table: pd.DataFrame, value: str) -> dict[str, object]:
    """Returns plotly's settings of thin error bars from the column low to high around `value`."""
    return dict(
        type="data", symmetric=False, array=(table.high - table[value]).tolist(),
        arrayminus=(table[value] - table.low).tolist(), thickness=1, width=0,
    )  # fmt: skip


def interval_texts(table: pd.DataFrame, value: str, style: str, **counts: str) -> list[str]:
    """Returns a hover text for each line: the value, its interval, and the counts that the table has.

    style: a format, such as .1%.  counts: column name -> the word for what the column counts.
    """
    out = []
    for line in table.to_dict("records"):
        said = f"{line[value]:{style}}, 95 % {line['low']:{style}} to {line['high']:{style}}"
        over = [f"{line[column]} {what}" for column, what in counts.items() if column in line]
        out.append(f"{said}<br>{', '.join(over)}" if over else said)
    return out
