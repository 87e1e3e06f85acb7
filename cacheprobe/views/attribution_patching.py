"""Draws the estimates of attribution patching beside the real patching grid, as two heat maps of one colour scale."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.ops.statistics import cell_correlations
from cacheprobe.views.patching import PatchingResult, patching_grid
from cacheprobe.views.style import Figure, layout_template

ESTIMATED_AND_REAL = ("estimated_nld", "nld")
"""Columns of the two heat maps."""
_NAMES = ("estimated from gradients", "real patching")


def attribution_patching_grid(grid: PatchingResult | pd.DataFrame, *, head: int | None = None) -> go.Figure:
    """Returns a plotly figure of two heat maps: the estimated and the real normalised logit difference by layer and
    position. The title has their correlation over the cells. Circles mark cells whose real patch flips the answer.

    grid: a result of `cp.patching.attribution`, or its table.  head: one head of a grid by heads; by default the maps
    show the mean over heads, and the correlation is over all of them.
    Raises: ValueError for a table without estimates or without the real grid, an unknown head, and an empty table.
    """
    table = grid if isinstance(grid, pd.DataFrame) else grid.table
    if lacking := [name for name in ESTIMATED_AND_REAL if name not in table.columns]:
        raise ValueError(f"there is no column {lacking[0]}; make the grid with cp.patching.attribution(..., real=True)")
    singles = [patching_grid(table, value=value, head=head) for value in ESTIMATED_AND_REAL]
    maps = [single.data[0] for single in singles]
    low, high = min(one.zmin for one in maps), max(one.zmax for one in maps)
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=_NAMES, figure=Figure())
    for column, (single, one) in enumerate(zip(singles, maps, strict=True), 1):
        one.update(zmin=low, zmax=high, showscale=column == len(maps))
        figure.add_trace(one, row=1, col=column)
        figure.update_xaxes(single.layout.xaxis.to_plotly_json(), row=1, col=column)
        figure.update_yaxes(single.layout.yaxis.to_plotly_json(), row=1, col=column)
    for circles in singles[1].data[1:]:
        figure.add_trace(circles, row=1, col=2)
    figure.update_yaxes(title="", row=1, col=2)
    figure.update_layout(
        template=layout_template(), title=_finding(table if head is None else table[table["head"] == head]),
        height=singles[0].layout.height + 48, dragmode=False, margin=dict(l=48, r=12, t=96, b=96),
        legend=dict(y=-0.4, yanchor="top"),
    )  # fmt: skip
    return figure


def _finding(table: pd.DataFrame) -> str:
    """Returns the figure's title: how well the estimates of these cells agree with the real patches."""
    found = cell_correlations(*(table[name].tolist() for name in ("position", *ESTIMATED_AND_REAL)))
    named = zip(("Pearson", "Spearman"), found, strict=True)
    said = ", ".join(f"{name} {value:.2f}" for name, value in named if value is not None)
    return f"Correlation of estimated and real patching: {said or 'undefined, because one grid is constant'}"
