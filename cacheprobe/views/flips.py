"""Draws which edits of the verifier's states flip the verdict on a rejected draft token: layers upwards, edits and
sites across."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.core.hook_names import site_label
from cacheprobe.views.style import STATUS_STYLES, Figure, layer_ticks, layout_template
from cacheprobe.views.text import markup, token_label

_COLOURS = ["#a87900", "#f0d58a", "#f3f0f9", "#aa97d6", "#4a2c8f"]
"""From "further from the drafted token" to "closer to it"; the middle is no change."""
_WIDTH = 24
"""Largest width of a token in the title and the hover text, in columns of a monospaced font."""
_LOWEST = 360
"""Least height of the figure in pixels."""


def flip_grid(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly heat map of `cp.analysis.flip(...).table`: layers upwards, one column for each kind of edit and
    site. Colour is the change in nats of the log-probability of the drafted token minus that of the committed one. A
    circle marks each edit after which the verifier chooses the drafted token.

    Raises: ValueError for an empty table, and for a table of several rejections.
    """
    if table.empty:
        raise ValueError("the table of edits is empty; there is nothing to draw")
    if table[["request_id", "step"]].drop_duplicates().shape[0] > 1:
        raise ValueError("the table holds several rejections; give the lines of one request and step")
    columns = list(dict.fromkeys(zip(table.edit, table.site, strict=True)))
    layers = sorted(int(layer) for layer in table.layer.unique())
    at = {(one.edit, one.site, one.layer): i for i, one in enumerate(table.itertuples())}
    hovers, changes = _hovers(table), table.change_nats.tolist()
    found = [[at.get((*column, layer)) for column in columns] for layer in layers]
    limit = float(table.change_nats.abs().max()) or 1.0
    figure = Figure(
        go.Heatmap(
            x=list(range(len(columns))),
            y=layers,
            z=[[None if i is None else changes[i] for i in line] for line in found],
            zmin=-limit,
            zmid=0,
            zmax=limit,
            colorscale=_COLOURS,
            text=[["" if i is None else hovers[i] for i in line] for line in found],
            hovertemplate="%{text}<extra></extra>",
            hoverongaps=False,
            xgap=1,
            ygap=1,
            colorbar=dict(
                title=dict(text="change,<br>nats", side="top", font=dict(size=12)),
                thickness=12, x=1.01, y=0, yanchor="bottom", len=0.94, outlinewidth=0, ticks="",
            ),
        )
    )  # fmt: skip
    flipped = table[table.flips]
    if len(flipped):
        figure.add_scatter(
            x=[columns.index(column) for column in zip(flipped.edit, flipped.site, strict=True)],
            y=flipped.layer.tolist(),
            mode="markers",
            name="the verifier chooses the drafted token",
            marker=dict(symbol="circle-open", size=9, line_width=2, color=STATUS_STYLES["rolled_back"]["color"]),
            hoverinfo="skip",
            showlegend=True,
        )
    figure.update_layout(
        template=layout_template(), title=_finding(table), height=max(170 + 16 * len(layers), _LOWEST), dragmode=False,
        margin=dict(l=48, r=12, t=104, b=100),
    )  # fmt: skip
    sites = [site for _, site in columns]
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(range(len(columns))),
        ticktext=sites,
        tickangle=0,
        showgrid=False,
        title=dict(text=_wrapped([site_label(site) for site in dict.fromkeys(sites)]), standoff=34),
    )
    for edit in dict.fromkeys(edit for edit, _ in columns):
        own = [x for x, column in enumerate(columns) if column[0] == edit]
        figure.add_annotation(
            text=edit, x=(own[0] + own[-1]) / 2, y=0, yref="paper", yshift=-34, showarrow=False, font=dict(size=12)
        )
    figure.update_yaxes(title="layer", showgrid=False, range=[layers[0] - 0.5, layers[-1] + 0.5], **layer_ticks(layers))
    for x in (i for i in range(1, len(columns)) if columns[i][0] != columns[i - 1][0]):
        figure.add_vline(x=x - 0.5, line_width=1.5, line_color=STATUS_STYLES["given_up"]["color"])
    return figure


def _wrapped(labels: list[str]) -> str:
    """Returns labels in lines of two, since the figure may be narrow."""
    lines = (", ".join(labels[i : i + 2]) for i in range(0, len(labels), 2))
    return ",<br>".join(lines)


def _hovers(table: pd.DataFrame) -> list[str]:
    """Returns the hover text of each line of the table, as escaped HTML."""
    return [
        f"request {one.request_id} · step {one.step} · judged position {one.position - 1}<br>"
        f"{one.edit} at {site_label(one.site)} of layer {one.layer}"
        + ("" if pd.isna(one.from_layer) or one.from_layer == one.layer else f", states of layer {int(one.from_layer)}")
        + f"<br>change {one.change_nats:+.3f} nats, then {one.difference_nats:+.3f}<br>"
        f"the verifier chooses <b>{_token(one.token)}</b>{', the drafted token' * bool(one.flips)}"
        for one in table.itertuples()
    ]


def _finding(table: pd.DataFrame) -> str:
    """Returns the figure's title: the two tokens, how many edits flip the verdict, and the lowest layer of one that
    does, or else the edit that comes closest."""
    first = table.iloc[0]
    drafted, committed = _token(first.drafted_token), _token(first.committed_token)
    flipped = table[table.flips]
    if flipped.empty:
        best = table.loc[table.difference_nats.idxmax()]
        return (
            f"No edit makes the verifier choose “{drafted}” instead of “{committed}”;<br>closest: {best.edit} at "
            f"{site_label(best.site)} of layer {best.layer} ({best.difference_nats:+.2f} nats)"
        )
    low = flipped.loc[flipped.layer.idxmin()]
    return (
        f"{len(flipped)} of {len(table)} edits make the verifier choose “{drafted}” instead of “{committed}”;<br>"
        f"lowest: {low.edit} at {site_label(low.site)} of layer {low.layer}"
    )


def _token(text: str) -> str:
    """Returns a token's text for the figure: white space visible, cut and escaped."""
    return markup(token_label(text, _WIDTH))
