"""Draws which experts computed each token of a request: layers and their experts upwards, tokens across."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import STATUS_STYLES, Figure, layer_ticks, layout_template
from cacheprobe.views.text import markup, token_label, visible

_COLUMNS = 10
"""Largest width of a token's label, in columns of a monospaced font."""
_LOWEST = 340
"""Least height of the figure in pixels."""
_REJECTED = ("rolled_back", "given_up")


def routing_figure(table: pd.DataFrame, request_id: int | None = None) -> go.Figure:
    """Returns a plotly heat map of `cp.analysis.routing(trace)` for one request: layers and their experts upwards,
    tokens across. Colour is the weight of the expert's output. A cross marks the experts of rejected draft tokens,
    which stand at the position of the token that was committed in their place.

    request_id: default: the first of the table.
    Raises: ValueError for a table without lines of this request.
    """
    if table.empty:
        raise ValueError("the table of routing is empty; there is nothing to draw")
    request = int(table.request_id.iloc[0]) if request_id is None else request_id
    own = table[(table.request_id == request) & (table.status != "superseded")]
    kept, rejected = own[own.status == "committed"], own[own.status.isin(_REJECTED)]
    if own.empty:
        raise ValueError(f"the table has no routing of request {request}")
    places = sorted(set(zip(own.layer.astype(int), own.expert.astype(int), strict=True)))
    heights = {place: height for height, place in enumerate(places)}
    positions = sorted(int(p) for p in own.position.unique())
    columns = {p: column for column, p in enumerate(positions)}
    weights: list[list[float | None]] = [[None] * len(positions) for _ in places]
    hovers = [[""] * len(positions) for _ in places]
    for one, hover in zip(kept.itertuples(), _hovers(kept), strict=True):
        y, x = heights[int(one.layer), int(one.expert)], columns[int(one.position)]
        weights[y][x], hovers[y][x] = float(one.weight), hover
    figure = Figure(
        go.Heatmap(
            x=list(range(len(positions))),
            y=list(range(len(places))),
            z=weights,
            zmin=0,
            zmax=float(own.weight.max()),
            text=hovers,
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            colorbar=dict(title=dict(text="weight", side="right", font=dict(size=12)), thickness=12, x=1.01),
        )
    )
    if len(rejected):
        figure.add_scatter(
            x=[columns[int(p)] for p in rejected.position],
            y=[heights[int(i), int(e)] for i, e in zip(rejected.layer, rejected.expert, strict=True)],
            mode="markers",
            name="of a rejected draft token",
            marker=dict(symbol="x-thin-open", size=7, color=STATUS_STYLES["rolled_back"]["color"]),
            text=_hovers(rejected),
            hovertemplate="%{text}<extra></extra>",
            showlegend=True,
        )
    figure.update_layout(
        template=layout_template(), title=_finding(kept if len(kept) else own), dragmode=False,
        height=max(140 + 12 * len(places), _LOWEST), margin=dict(l=48, r=12, t=72, b=64),
    )  # fmt: skip
    tokens = dict(zip(own.position, own.token, strict=True)) | dict(zip(kept.position, kept.token, strict=True))
    figure.update_xaxes(
        title="position (token)",
        tickmode="array",
        tickvals=list(range(len(positions))),
        ticktext=[f"{p}<br>{markup(token_label(tokens[p], _COLUMNS))}" for p in positions],
        showgrid=False,
    )
    layers = sorted({layer for layer, _ in places})
    named = [[heights[place] for place in places if place[0] == layer] for layer in layers]
    step = layer_ticks(layers)["dtick"]
    figure.update_yaxes(
        title="layer and its experts",
        tickmode="array",
        tickvals=[sum(own) / len(own) for own in named[::step]],
        ticktext=[str(layer) for layer in layers[::step]],
        showgrid=False,
    )
    for own_heights in named[1:]:
        figure.add_hline(y=own_heights[0] - 0.5, line_width=1, line_color=STATUS_STYLES["given_up"]["color"])
    return figure


def _hovers(table: pd.DataFrame) -> list[str]:
    """Returns the hover text of each line of the table, as escaped HTML."""
    return [
        f"request {one.request_id} · step {one.step} · position {one.position} · {one.status}<br>"
        f"<b>{markup(visible(one.token))}</b><br>layer {one.layer}, expert {one.expert}: weight {one.weight:.3f}, "
        f"rank {one.rank}"
        for one in table.itertuples()
    ]


def _finding(table: pd.DataFrame) -> str:
    """Returns the figure's title: the layer and expert that computes most tokens."""
    counts = table.groupby(["layer", "expert"]).position.nunique()
    layer, expert = counts.idxmax()
    num_tokens = table[table.layer == layer].position.nunique()
    return f"Layer {layer} sends {counts.max()} of {num_tokens} tokens to expert {expert}, the most of any"
