"""Draws a patching grid as a heat map: layers upwards, positions across, with circles on cells in which more than half
of the patches turned the answer."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import STATUS_STYLES, Figure, layout_template
from cacheprobe.views.text import markup, token_label, visible

_COLUMN_WORDS = {
    "nld": ("normalised logit difference", "0 corrupted, 1 clean"),
    "estimated_nld": ("estimated normalised logit difference", "0 corrupted, 1 clean"),
    "effect": ("gain of the answer's probability", "over the noisy run"),
}
_ANSWER_CHANGES = {"flip": "the answer turns over", "is_top": "the answer is the first choice again"}
_COLUMNS = 10
"""Largest width of a token's label, in columns of a monospaced font."""
_MOST_TICKS = 16
_LOWEST = 340
"""Least height of the figure in pixels: the words beside the colour scale need it."""


@runtime_checkable
class PatchingResult(Protocol):
    """Describes the two parts of a `cp.patching` result that `patching_grid` draws: its table and its settings."""

    @property
    def table(self) -> pd.DataFrame:
        """A DataFrame with one line for each patched cell: layer, position, token, and head or sample if there are
        several."""
        ...

    @property
    def meta(self) -> Mapping[str, object]:
        """Settings of the patching; meta["value"] names the column to draw."""
        ...


def patching_grid(
    grid: PatchingResult | pd.DataFrame, *, value: str | None = None, head: int | None = None
) -> go.Figure:
    """Returns a plotly heat map of one column of a patching grid: layers upwards, positions across. A circle marks a
    cell if the answer flips in more than half of its patches (column flip), or in causal tracing is the first choice
    (column is_top).

    grid: a result of `cp.patching`, or its table, which may come from a file.  value: a column; by default the column
    that the result names; for a table nld, or else effect.
    head: one head of a grid by heads; by default the mean over heads. Samples of causal tracing are averaged too.
    Raises: ValueError for an unknown column or head, and for an empty table.
    """
    table, own_column = (grid, "") if isinstance(grid, pd.DataFrame) else (grid.table, str(grid.meta["value"]))
    if value is None:
        value = str(own_column or next((column for column in _COLUMN_WORDS if column in table.columns), "nld"))
    if value not in table.columns or not pd.api.types.is_numeric_dtype(table[value]):
        raise ValueError(f"unknown column {value!r}; a picture shows numbers, the table has {', '.join(table.columns)}")
    if head is not None:
        if "head" not in table.columns or not (table["head"] == head).any():
            raise ValueError(f"there is no head {head} in this grid; leave out head=, or patch with heads=True")
        table = table[table["head"] == head]
    if table.empty:
        raise ValueError("the table of the grid is empty; there is nothing to draw")
    cells = _cells(table, value)
    layers, positions = (sorted(cells[axis].unique()) for axis in ("layer", "position"))
    values = cells.pivot(index="layer", columns="position", values="value")
    low, high = min(0.0, float(values.min(axis=None))), max(0.0, float(values.max(axis=None)))
    figure = Figure(
        go.Heatmap(
            x=list(range(len(positions))),
            y=list(range(len(layers))),
            z=values.to_numpy(),
            zmin=low,
            zmax=high if high > low else low + 1,
            text=cells.pivot(index="layer", columns="position", values="hover").to_numpy(),
            hovertemplate="%{text}<extra></extra>",
            xgap=1,
            ygap=1,
            colorbar=dict(
                title=dict(
                    text="<br>".join(map(markup, _COLUMN_WORDS.get(value, (value,)))), side="right", font=dict(size=12)
                ),
                thickness=12,
                x=1.01,
            ),
        )
    )
    change = next((change for change in _ANSWER_CHANGES if change in table.columns), None)
    if change is not None and (changed := cells[cells.turned > 0.5]).size:
        figure.add_scatter(
            x=[positions.index(p) for p in changed.position],
            y=[layers.index(layer) for layer in changed.layer],
            mode="markers",
            name=_ANSWER_CHANGES[change],
            marker=dict(symbol="circle-open", size=7, color=STATUS_STYLES["rolled_back"]["color"]),
            hoverinfo="skip",
            showlegend=True,
        )
    figure.update_layout(
        template=layout_template(), title=_finding(cells, value), height=max(140 + 16 * len(layers), _LOWEST),
        dragmode=False, margin=dict(l=48, r=12, t=72, b=64),
    )  # fmt: skip
    ticks = range(0, len(layers), max(1, -(-len(layers) // _MOST_TICKS)))
    tokens = dict(zip(cells.position, cells.token, strict=True))
    labels = [f"{p}<br>{markup(token_label(tokens[p], _COLUMNS))}" for p in positions]
    figure.update_xaxes(
        title="position (token)",
        tickmode="array",
        tickvals=list(range(len(positions))),
        ticktext=labels,
        showgrid=False,
    )
    figure.update_yaxes(
        title="layer", tickmode="array", tickvals=list(ticks), ticktext=[str(layers[i]) for i in ticks], showgrid=False
    )
    return figure


def _cells(table: pd.DataFrame, value: str) -> pd.DataFrame:
    """Returns a DataFrame with one line for each layer and position of a patching grid: layer, position, value (mean of
    the patches), turned (share of patches whose answer turned), token, n (patches), hover."""
    change = next((change for change in _ANSWER_CHANGES if change in table.columns), None)
    turned = table[change].astype(float) if change else 0.0
    grouped = table.assign(value=table[value].astype(float), turned=turned).groupby(["layer", "position"])
    cells = grouped.agg(
        value=("value", "mean"), turned=("turned", "mean"), token=("token", "first"), n=("value", "size")
    )
    cells = cells.reset_index()
    cells["hover"] = [
        f"layer {c.layer} · position {c.position} · <b>{markup(visible(c.token))}</b><br>{value} {c.value:.3f}"
        + (f", mean of {c.n}" if c.n > 1 else "")
        + (f"<br>{_ANSWER_CHANGES[change]}: {c.turned:.0%}" if change else "")
        for c in cells.itertuples()
    ]
    return cells


def _finding(cells: pd.DataFrame, value: str) -> str:
    """Returns the figure's title: the largest value, with its layer, position and token."""
    best = cells.loc[cells.value.idxmax()]
    where = f"layer {best.layer}, position {best.position} ({markup(visible(best.token))})"
    return f"Largest {markup(_COLUMN_WORDS.get(value, (value,))[0])}: {best.value:.2f}, at {where}"
