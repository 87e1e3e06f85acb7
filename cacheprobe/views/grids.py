"""Draws heat maps of layers: patching grids, their estimates, edits that flip a verdict, and experts of each token."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from cacheprobe.core.hook_names import site_label
from cacheprobe.core.values import TableLine
from cacheprobe.ops.statistics import cell_correlations
from cacheprobe.views.style import (
    GREY,
    STATUS_STYLES,
    Figure,
    layer_ticks,
    panels,
    require_lines,
    set_layout,
    zero_centred,
)
from cacheprobe.views.text import markup, token_label, visible

if TYPE_CHECKING:
    from cacheprobe.edits.patching.grid import PatchingGrid

_COLUMNS, _TITLE_COLUMNS = 10, 24
"""Largest width of a token below the grid, and in the title and the hover text, in columns of a monospaced font."""
_LOWEST, _LOWEST_FLIPS = 340, 360
"""Least height of a figure in pixels: the words beside the colour scale need it."""

# What the grids share


def _heat_map(
    cells: Mapping[tuple, tuple[float, str]], rows: Sequence, columns: Sequence, colorbar: dict, **settings: object
) -> Figure:
    """Returns a figure with one heat map: `rows` upwards, `columns` across.

    cells: {(row, column): (number, hover text)}; a missing cell is blank.  colorbar, settings: as plotly names them.
    """
    found = [[cells.get((row, column), (None, "")) for column in columns] for row in rows]
    heat_map = go.Heatmap(
        x=list(range(len(columns))), y=list(range(len(rows))),
        z=np.array([[number for number, _ in line] for line in found], dtype=float),
        text=[[hover for _, hover in line] for line in found], hovertemplate="%{text}<extra></extra>",
        xgap=1, ygap=1, colorbar=dict(thickness=12, x=1.01, **colorbar),
    )  # fmt: skip
    return Figure(heat_map.update(settings))


def _mark_cells(figure: go.Figure, x: list[int], y: list[int], name: str, marker: dict, **hover: object) -> None:
    """Adds a mark in the colour of rolled-back rows to cells of a heat map, with `name` in the legend."""
    marker = dict(color=STATUS_STYLES["rolled_back"]["color"], **marker)
    figure.add_scatter(x=x, y=y, mode="markers", name=name, marker=marker, showlegend=True, **hover)


def _name_tokens(figure: go.Figure, positions: Sequence[int], tokens: Mapping[int, str]) -> None:
    """Writes each position and its token below the columns of a heat map."""
    labels = [f"{p}<br>{markup(token_label(tokens[p], _COLUMNS))}" for p in positions]
    figure.update_xaxes(
        title="position (token)", tickmode="array", tickvals=list(range(len(positions))), ticktext=labels,
        showgrid=False,
    )  # fmt: skip


# Patching

_COLUMN_WORDS = {
    "nld": ("normalised logit difference", "0 corrupted, 1 clean"),
    "estimated_nld": ("estimated normalised logit difference", "0 corrupted, 1 clean"),
    "effect": ("gain of the answer's probability", "over the noisy run"),
}
_ANSWER_CHANGES = {"flip": "the answer turns over", "is_top": "the answer is the first choice again"}
_MOST_TICKS = 16


def patching_grid(
    grid: "PatchingGrid | pd.DataFrame", *, value: str | None = None, head: int | None = None
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
    require_lines(table, "the table of the grid is empty; there is nothing to draw")
    change = next((change for change in _ANSWER_CHANGES if change in table.columns), None)
    cells = _cells(table, value, change)
    layers, positions = (sorted(cells[axis].unique().tolist()) for axis in ("layer", "position"))
    words = _COLUMN_WORDS.get(value, (value,))
    figure = _heat_map(
        {(c.layer, c.position): (c.value, c.hover) for c in cells.itertuples()}, layers, positions,
        dict(title=dict(text="<br>".join(map(markup, words)), side="right", font=dict(size=12))),
        **zero_centred(cells.value),
    )  # fmt: skip
    changed = cells[cells.turned > 0.5]
    if change is not None and len(changed):
        x, y = [positions.index(p) for p in changed.position], [layers.index(layer) for layer in changed.layer]
        circle = dict(symbol="circle", size=7, line=dict(color="white", width=1))
        _mark_cells(figure, x, y, _ANSWER_CHANGES[change], circle, hoverinfo="skip")
    best = cells.loc[cells.value.idxmax()]
    where = f"layer {best.layer}, position {best.position} ({markup(visible(best.token))})"
    title, height = f"Largest {markup(words[0])}: {best.value:.2f}, at {where}", max(140 + 16 * len(layers), _LOWEST)
    set_layout(figure, title, height, top=72, bottom=64, dragmode=False)
    _name_tokens(figure, positions, dict(zip(cells.position, cells.token, strict=True)))
    ticks = range(0, len(layers), max(1, -(-len(layers) // _MOST_TICKS)))
    figure.update_yaxes(
        title="layer", tickmode="array", tickvals=list(ticks), ticktext=[str(layers[i]) for i in ticks], showgrid=False
    )
    return figure


def _cells(table: pd.DataFrame, value: str, change: str | None) -> pd.DataFrame:
    """Returns a DataFrame with one line for each layer and position of a patching grid: layer, position, value (mean of
    the patches), turned (share of patches for which the column `change` is True), token, n (patches), hover."""
    turned = table[change].astype(float) if change else 0.0
    grouped = table.assign(value=table[value].astype(float), turned=turned).groupby(["layer", "position"])
    means = dict(value=("value", "mean"), turned=("turned", "mean"), token=("token", "first"), n=("value", "size"))
    cells = grouped.agg(**means).reset_index()
    cells["hover"] = [
        f"layer {c.layer} · position {c.position} · <b>{markup(visible(c.token))}</b><br>{value} {c.value:.3f}"
        + (f", mean of {c.n}" if c.n > 1 else "")
        + (f"<br>{_ANSWER_CHANGES[change]}: {c.turned:.0%}" if change else "")
        for c in cells.itertuples()
    ]
    return cells


ESTIMATED_AND_REAL = ("estimated_nld", "nld")
"""Columns of the two heat maps of `attribution_patching_grid`."""


def attribution_patching_grid(grid: "PatchingGrid | pd.DataFrame", *, head: int | None = None) -> go.Figure:
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
    scale = zero_centred([bound for one in maps for bound in (one.zmin, one.zmax)])
    names = ("estimated from gradients", "real patching")
    figure = panels(names, shared_yaxes=True)
    for column, (single, one) in enumerate(zip(singles, maps, strict=True), 1):
        one.update(showscale=column == len(maps), **scale)
        figure.add_trace(one, row=1, col=column)
        figure.update_xaxes(single.layout.xaxis.to_plotly_json(), row=1, col=column)
        figure.update_yaxes(single.layout.yaxis.to_plotly_json(), row=1, col=column)
    for circles in singles[1].data[1:]:
        figure.add_trace(circles, row=1, col=2)
    figure.update_yaxes(title="", row=1, col=2)
    own = table if head is None else table[table["head"] == head]
    found = cell_correlations(*(own[name].tolist() for name in ("position", *ESTIMATED_AND_REAL)))
    named = zip(("Pearson", "Spearman"), found, strict=True)
    said = ", ".join(f"{name} {value:.2f}" for name, value in named if value is not None)
    title = f"Correlation of estimated and real patching: {said or 'undefined, because one grid is constant'}"
    height = singles[0].layout.height + 48
    set_layout(figure, title, height, top=96, bottom=96, dragmode=False, legend=dict(y=-0.24, yanchor="top"))
    return figure


# Edits that flip a verdict


def flip_grid(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly heat map of `cp.analysis.flip(...).table`: layers upwards, one column for each kind of edit and
    site. Colour is the change in nats of the log-probability of the drafted token minus that of the committed one. A
    circle marks each edit after which the verifier chooses the drafted token.

    Raises: ValueError for an empty table, and for a table of several rejections.
    """
    require_lines(table, "the table of edits is empty; there is nothing to draw")
    if table[["request_id", "step"]].drop_duplicates().shape[0] > 1:
        raise ValueError("the table holds several rejections; give the lines of one request and step")
    columns = list(dict.fromkeys(zip(table.edit, table.site, strict=True)))
    layers = sorted(int(layer) for layer in table.layer.unique())
    figure = _heat_map(
        {(one.layer, (one.edit, one.site)): (one.change_nats, _edit_hover(one)) for one in table.itertuples()},
        layers, columns,
        dict(title=dict(text="change<br>(nats)", side="top", font=dict(size=12)), y=0, yanchor="bottom", len=0.94,
             outlinewidth=0, ticks=""),
        y=layers, hoverongaps=False, **zero_centred(table.change_nats),
    )  # fmt: skip
    flipped = table[table.flips]
    if len(flipped):
        x = [columns.index(column) for column in zip(flipped.edit, flipped.site, strict=True)]
        circle = dict(symbol="circle", size=8, line=dict(color="white", width=1))
        name = "the verifier chooses the drafted token"
        _mark_cells(figure, x, flipped.layer.tolist(), name, circle, hoverinfo="skip")
    height = max(170 + 16 * len(layers), _LOWEST_FLIPS)
    set_layout(figure, _flip_finding(table), height, top=104, bottom=100, dragmode=False)
    sites = [site for _, site in columns]
    labels = [site_label(site) for site in dict.fromkeys(sites)]
    pairs = [", ".join(labels[i : i + 2]) for i in range(0, len(labels), 2)]  # the figure may be narrow
    figure.update_xaxes(
        tickmode="array", tickvals=list(range(len(columns))), ticktext=sites, tickangle=0, showgrid=False,
        title=dict(text=",<br>".join(pairs), standoff=34),
    )  # fmt: skip
    moved = table[(table.edit == "drafter") & (table.from_layer < table.layer)]
    for edit in dict.fromkeys(edit for edit, _ in columns):
        own = [x for x, column in enumerate(columns) if column[0] == edit]
        if edit == "drafter" and len(moved):  # an early exit: below, its pass computed what the verifier's did
            last, words = int(moved.from_layer.max()), "drafter's last layer: up to it, no change by construction"
            figure.add_scatter(
                x=[own[0] - 0.5, own[-1] + 0.5], y=[last + 0.5] * 2, mode="lines", name=words, showlegend=True,
                line=dict(color=GREY, dash="dot", width=2), hoverinfo="skip",
            )  # fmt: skip
        figure.add_annotation(
            text=edit, x=(own[0] + own[-1]) / 2, y=0, yref="paper", yshift=-34, showarrow=False, font=dict(size=12)
        )
    figure.update_yaxes(title="layer", showgrid=False, range=[layers[0] - 0.5, layers[-1] + 0.5], **layer_ticks(layers))
    for x in (i for i in range(1, len(columns)) if columns[i][0] != columns[i - 1][0]):
        figure.add_vline(x=x - 0.5, line_width=1.5, line_color=STATUS_STYLES["abandoned"]["color"])
    return figure


def _edit_hover(one: TableLine) -> str:
    """Returns the hover text of one line of the table of edits, as escaped HTML."""
    is_moved = not pd.isna(one.from_layer) and one.from_layer != one.layer
    return (
        f"request {one.request_id} · step {one.step} · judged position {one.position - 1}<br>"
        f"{one.edit} at {site_label(one.site)} of layer {one.layer}"
        + (f", states of layer {int(one.from_layer)}" if is_moved else "")
        + f"<br>change {one.change_nats:+.3f} nats, then {one.difference_nats:+.3f}<br>"
        f"the verifier chooses <b>{_token(one.token)}</b>{', the drafted token' * bool(one.flips)}"
    )


def _flip_finding(table: pd.DataFrame) -> str:
    """Returns the figure's title: the two tokens, how many edits flip the verdict, and the lowest layer of one that
    does, or else the edit that comes closest."""
    first, flipped = table.iloc[0], table[table.flips]
    tokens = f"make the verifier choose “{_token(first.drafted_token)}” instead of “{_token(first.committed_token)}”"
    if flipped.empty:
        best = table.loc[table.difference_nats.idxmax()]
        where = f"{best.edit} at {site_label(best.site)} of layer {best.layer}"
        return f"No edit {tokens.replace('make', 'makes', 1)};<br>closest: {where} ({best.difference_nats:+.2f} nats)"
    low = flipped.loc[flipped.layer.idxmin()]
    where = f"{low.edit} at {site_label(low.site)} of layer {low.layer}"
    return f"{len(flipped)} of {len(table)} edits {tokens};<br>lowest: {where}"


def _token(text: str) -> str:
    """Returns a token's text for the figure: white space visible, cut and escaped."""
    return markup(token_label(text, _TITLE_COLUMNS))


# Experts


def routing_figure(table: pd.DataFrame, request_id: int | None = None) -> go.Figure:
    """Returns a plotly heat map of `cp.analysis.routing(trace)` for one request: layers and their experts upwards,
    tokens across. Colour is the weight of the expert's output. A cross marks the experts of rejected draft tokens,
    which stand at the position of the token that was committed in their place.

    request_id: default: the first of the table.
    Raises: ValueError for a table without lines of this request.
    """
    require_lines(table, "the table of routing is empty; there is nothing to draw")
    request = int(table.request_id.iloc[0]) if request_id is None else request_id
    own = table[(table.request_id == request) & (table.status != "superseded")]
    kept, rejected = own[own.status == "committed"], own[own.status.isin(("rolled_back", "abandoned"))]
    require_lines(own, f"the table has no routing of request {request}")
    places = sorted(set(zip(own.layer.astype(int), own.expert.astype(int), strict=True)))
    heights = {place: height for height, place in enumerate(places)}
    positions = sorted(int(p) for p in own.position.unique())
    figure = _heat_map(
        {((one.layer, one.expert), one.position): (float(one.weight), _expert_hover(one)) for one in kept.itertuples()},
        places, positions, dict(title=dict(text="weight", side="right", font=dict(size=12))),
        zmin=0, zmax=float(own.weight.max()), hoverongaps=False,
    )  # fmt: skip
    if len(rejected):
        x = [positions.index(p) for p in rejected.position]
        y = [heights[place] for place in zip(rejected.layer, rejected.expert, strict=True)]
        texts = [_expert_hover(one) for one in rejected.itertuples()]
        hover = dict(text=texts, hovertemplate="%{text}<extra></extra>")
        _mark_cells(figure, x, y, "of a rejected draft token", dict(symbol="x-thin-open", size=7), **hover)
    height = max(140 + 12 * len(places), _LOWEST)
    set_layout(figure, _busiest_expert(kept if len(kept) else own), height, top=72, bottom=64, dragmode=False)
    tokens = dict(zip(own.position, own.token, strict=True)) | dict(zip(kept.position, kept.token, strict=True))
    _name_tokens(figure, positions, tokens)
    layers = sorted({layer for layer, _ in places})
    of_layers = [[heights[place] for place in places if place[0] == layer] for layer in layers]
    every = layer_ticks(layers)["dtick"]
    figure.update_yaxes(
        title="layer and its experts", tickmode="array", showgrid=False,
        tickvals=[sum(own) / len(own) for own in of_layers[::every]],
        ticktext=[str(layer) for layer in layers[::every]],
    )  # fmt: skip
    for own_heights in of_layers[1:]:
        figure.add_hline(y=own_heights[0] - 0.5, line_width=1, line_color=STATUS_STYLES["abandoned"]["color"])
    return figure


def _expert_hover(one: TableLine) -> str:
    """Returns the hover text of one line of the table of routing, as escaped HTML."""
    return (
        f"request {one.request_id} · step {one.step} · position {one.position} · {one.status}<br>"
        f"<b>{markup(visible(one.token))}</b><br>layer {one.layer}, expert {one.expert}: weight {one.weight:.3f}, "
        f"rank {one.rank}"
    )


def _busiest_expert(table: pd.DataFrame) -> str:
    """Returns the figure's title: the layer and expert that computes most tokens."""
    counts = table.groupby(["layer", "expert"]).position.nunique()
    layer, expert = counts.idxmax()
    num_tokens = table[table.layer == layer].position.nunique()
    return f"Layer {layer} sends {counts.max()} of {num_tokens} tokens to expert {expert}, the most of any"
