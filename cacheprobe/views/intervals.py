"""Formats values and their 95 % intervals as plotly's error bars and as hover texts."""

import pandas as pd


def error_bars(table: pd.DataFrame, value: str) -> dict[str, object]:
    """Returns plotly's `error_y` settings as a dict: thin bars from the column `low` to the column `high`, around the
    column that `value` names."""
    return dict(
        type="data", symmetric=False, array=(table.high - table[value]).tolist(),
        arrayminus=(table[value] - table.low).tolist(), thickness=1, width=0,
    )  # fmt: skip


def interval_texts(table: pd.DataFrame, value: str, style: str, **counts: str) -> list[str]:
    """Returns a list with one hover text for each line of the table: the value, its 95 % interval and its counts, such
    as "0.81, 95 % 0.78 to 0.84<br>900 examples".

    value: the column of the value.  style: a number format, such as ".1%".  counts: column name -> the word for what
    the column counts; columns that the table lacks are left out.
    """
    texts = []
    for line in table.to_dict("records"):
        text = f"{line[value]:{style}}, 95 % {line['low']:{style}} to {line['high']:{style}}"
        counted = [f"{line[column]} {what}" for column, what in counts.items() if column in line]
        texts.append(f"{text}<br>{', '.join(counted)}" if counted else text)
    return texts
