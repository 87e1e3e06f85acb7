"""Draws a sweep as small multiples: one panel, with one curve by layer, for each pair of values of two axes."""

import re
from collections.abc import Iterable
from typing import TypeVar

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import STATUS_STYLES, curve, layer_ticks, panels, require_lines, set_layout
from cacheprobe.views.text import markup, shorten

MOST = 8
"""Largest number of values of one axis that are drawn."""
_VALUE_WORDS = {
    "agrees_mean": "share of first choices that are the committed token",
    "rank_median": "median rank of the committed token",
    "logprob_nats_mean": "mean log-probability of the committed token (nats)",
    "entropy_nats_mean": "mean entropy (nats)",
}
_SHARES = {"agrees_mean"}
_NAME = 18
"""Largest width of the name beside a panel, in columns of a monospaced font."""
NONE = "none"
_PARTS = re.compile(r"\d+|\D+")
T = TypeVar("T")


def in_order(values: Iterable[T]) -> list[T]:
    """Returns the values of a sweep's axis as a list in drawing order. Numbers in a text are compared as numbers:
    layer=9 comes before layer=10."""
    return sorted(values, key=lambda value: [(*_number(part), part) for part in _PARTS.findall(str(value))])


def _number(part: str) -> tuple[bool, int]:
    return (False, int(part)) if part.isdecimal() else (True, 0)


def sweep_grid(layers: pd.DataFrame, rows: str, columns: str, value: str = "agrees_mean") -> go.Figure:
    """Returns a plotly figure of small multiples: a panel for each pair of values of two sweep axes, `rows` downwards
    and `columns` across. A panel's curve is the column `value` by layer, as the mean over the sweep's cells with this
    pair.

    Only committed rows count. layers: from `Sweep.layers`.  value: one of its numeric columns, by default agrees_mean.
    Raises: ValueError for an unknown column, one axis given twice, more than 8 values of an axis, and a table without
    committed rows.
    """
    if rows == columns:
        raise ValueError(f"rows and columns are both {rows}; give two axes")
    for name in (rows, columns, value, "layer", "status"):
        if name not in layers.columns:
            raise ValueError(f"unknown column {name!r}; the table has {', '.join(map(str, layers.columns))}")
    table = layers[layers.status == "committed"]
    require_lines(table, "no committed row was read: the table is empty; a sweep whose run.capture has Z fills it")
    table = table.assign(
        **{name: table[name].astype(object).where(table[name].notna(), NONE) for name in (rows, columns)}
    )
    down, across = (in_order(table[name].unique()) for name in (rows, columns))
    for name, values in ((rows, down), (columns, across)):
        if len(values) > MOST:
            raise ValueError(f"{name} has {len(values)} values, at most {MOST} are drawn; choose some of them first")
    means = table.groupby([rows, columns, "layer"])[value].agg(["mean", "size"])
    titles = [shorten(f"{columns}={b}", 32) for b in across] + [""] * (len(across) * (len(down) - 1))
    spacing = dict(vertical_spacing=0.08 / len(down), horizontal_spacing=0.02)
    shared = dict(shared_xaxes=True, shared_yaxes=True)
    figure = panels([markup(title) for title in titles], lines=len(down), **shared, **spacing)
    for i, a in enumerate(down):
        for j, b in enumerate(across):
            if (a, b) not in means.index.droplevel("layer"):
                continue
            panel = means.loc[(a, b)]
            panel_name = markup(f"{rows}={a}, {columns}={b}")
            hover = f"{panel_name}<br>layer %{{x}}: %{{y:.3f}}, committed rows, mean of %{{customdata}} cells"
            more = dict(row=i + 1, col=j + 1, customdata=panel["size"].tolist(), showlegend=False)
            curve(figure, panel.reset_index(), "mean", panel_name, hover, STATUS_STYLES["committed"], **more)
        figure.update_yaxes(title=markup(shorten(f"{rows}={a}", _NAME)), row=i + 1, col=1)
    figure.update_xaxes(**layer_ticks(table.layer))
    figure.update_xaxes(title="layer", row=len(down))
    if value in _SHARES:
        figure.update_yaxes(range=[-0.04, 1.06])
    last_layer = means.groupby([rows, columns]).tail(1)["mean"]
    (a, b, _), best = last_layer.idxmax(), last_layer.max()
    panel_name = f"{rows}={shorten(str(a), 32)}, {columns}={shorten(str(b), 32)}"
    title = f"Last layer, largest {_VALUE_WORDS.get(value, value)}: {best:.2f} at {panel_name}"
    if len(last_layer) > 1 and (last_layer == best).all():
        title = f"Last layer, {_VALUE_WORDS.get(value, value)}: {best:.2f} in every panel"
    set_layout(figure, markup(title), 120 + 150 * len(down), top=84, left=64, dragmode=False)
    return figure
