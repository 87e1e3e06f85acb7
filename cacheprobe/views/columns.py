"""Draws one column of numbers of any table: by layer, position or step if the table has them, else as bars."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.acceptance import COLOURS, MOST_CURVES, SYMBOLS
from cacheprobe.views.style import Figure, error_bars, layer_ticks, set_layout
from cacheprobe.views.text import markup, shorten

_ACROSS = ("layer", "position", "step")
"""Columns that stand on the horizontal axis; the first that a table has."""
_MOST_BARS = 60


def columns_to_draw(table: pd.DataFrame) -> list[str]:
    """Returns the names of the columns that `column_figure` can draw: numbers, but not those of the horizontal axis;
    fractions before whole numbers."""
    across = _across(table)
    numbers = [str(name) for name in table.select_dtypes("number").columns if name != across]
    fractions = [name for name in numbers if pd.api.types.is_float_dtype(table[name])]
    return [*fractions, *(name for name in numbers if name not in fractions)]


def column_figure(table: pd.DataFrame, column: str) -> go.Figure:
    """Returns a plotly figure of one column of numbers. By layer, position or step: a curve for each combination of the
    text columns' values, at most 8. Without these columns: a bar for each of the first 60 lines.

    table: any. Columns low and high become intervals, if they enclose the values.
    Raises: ValueError for a column that the table does not have as numbers, and for an empty table.
    """
    if column not in columns_to_draw(table):
        raise ValueError(
            f"no column of numbers {column!r}; the table has {', '.join(columns_to_draw(table)) or 'none'}"
        )
    known = table[table[column].notna()]
    if known.empty:
        raise ValueError(f"no line of the table has a value of {column}")
    across = _across(table)
    figure = Figure()
    if across is None:
        left_out = _draw_bars(figure, known, column)
    else:
        left_out = _draw_curves(figure, known, column, across)
    low, high = known[column].min(), known[column].max()
    by = f" by {across}" if across else ""
    title = f"{markup(column)}{by}: from {low:.4g} to {high:.4g}{left_out}"
    set_layout(figure, title, 380, top=72, bottom=60, left=52, dragmode=False)
    figure.update_yaxes(title=markup(column))
    return figure


def _across(table: pd.DataFrame) -> str | None:
    """Returns the column of the horizontal axis; None if the table has none of them as numbers."""
    numbers = table.select_dtypes("number").columns
    return next((name for name in _ACROSS if name in numbers and table[name].nunique() > 1), None)


def _draw_curves(figure: go.Figure, table: pd.DataFrame, column: str, across: str) -> str:
    """Adds the curves. Returns what the title says of those that are left out; "" for none."""
    groups = _groups(table)
    names = list(dict.fromkeys(groups))
    for i, name in enumerate(names[:MOST_CURVES]):
        lines = table[groups == name].sort_values(across, kind="stable")
        mode = "lines+markers" if lines[across].is_unique else "markers"
        figure.add_scatter(
            x=lines[across].tolist(), y=lines[column].tolist(), mode=mode, name=markup(shorten(name, 40)),
            line=dict(color=COLOURS[i], width=2), marker=dict(symbol=SYMBOLS[i], size=6),
            error_y=error_bars(lines, column) if _has_interval(table, column) else None,
            showlegend=len(names) > 1,
            hovertemplate=f"{markup(name)}<br>{across} %{{x}}: %{{y:.4g}}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title=across, **(layer_ticks(table[across]) if across == "layer" else {}))
    more = len(names) - MOST_CURVES
    return f"; {more} curves are left out" if more > 0 else ""


def _draw_bars(figure: go.Figure, table: pd.DataFrame, column: str) -> str:
    """Adds the bars. Returns what the title says of the lines that are left out; "" for none."""
    lines = table.head(_MOST_BARS)
    names = [f"{name}" if name else f"line {i}" for i, name in enumerate(_groups(lines, most=_MOST_BARS), start=1)]
    figure.add_bar(
        x=list(range(len(lines))), y=lines[column].tolist(), marker_color=COLOURS[0],
        error_y=error_bars(lines, column) if _has_interval(lines, column) else None,
        customdata=[markup(name) for name in names], hovertemplate="%{customdata}: %{y:.4g}<extra></extra>",
    )  # fmt: skip
    labels = [markup(shorten(name, 16)) for name in names]
    figure.update_xaxes(tickvals=list(range(len(lines))), ticktext=labels)
    more = len(table) - len(lines)
    return f"; {more} lines are left out" if more > 0 else ""


def _groups(table: pd.DataFrame, most: int = MOST_CURVES) -> pd.Series:
    """Returns a name for each line: its values of those text columns, in their order, that have several values and
    together at most `most` combinations."""
    chosen: list[str] = []
    for name in _text_columns(table):
        if table[[*chosen, name]].drop_duplicates().shape[0] <= most:
            chosen.append(name)
    if not chosen:
        return pd.Series("", index=table.index)
    return table[chosen].astype(str).agg(", ".join, axis=1)


def _text_columns(table: pd.DataFrame) -> Sequence[str]:
    """Returns the names of the columns of short texts that have more than one value."""
    texts = [name for name in table.columns if table[name].map(lambda value: isinstance(value, str)).all()]
    return [str(name) for name in texts if table[name].nunique() > 1 and table[name].str.len().max() <= 60]


def _has_interval(table: pd.DataFrame, column: str) -> bool:
    """Returns True if the columns low and high enclose every value of a column."""
    if not {"low", "high"} <= set(table.columns) or column in ("low", "high"):
        return False
    return bool(((table.low <= table[column]) & (table[column] <= table.high)).all())
