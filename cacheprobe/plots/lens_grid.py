"""Draws a layer x position grid: each layer's most likely token, compared with the committed token."""

import textwrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from cacheprobe.core.records import DISCARDED_DRAFT
from cacheprobe.core.values import TableLine
from cacheprobe.plots.lens_table import (
    BELOW,
    MARKS,
    NOT_COMPARED,
    NOTHING_TO_COMPARE,
    TOKEN_COLUMNS,
    Include,
    Measure,
    Scale,
    column_label,
    column_words,
    columns_of,
    finding,
    reads_and_predicts,
    runs_of,
    scale_of,
    select,
)
from cacheprobe.plots.style import STATUS_STYLES, Figure, layout_template
from cacheprobe.plots.text import markup, token_label, visible

_CELL = (50, 19)
"""Pixels of a cell."""
_GREY = "#b9bfc7"
"""Colour of cells that are not compared; dark letters are readable on it, on a light and on a dark page."""
_LOWEST = 180
"""Least height in pixels: the words beside the colour scale need it."""


def lens_grid(
    hypotheses: pd.DataFrame,
    request_id: int,
    *,
    colour: Measure = "logprob",
    include: Include = "committed",
    positions: range | None = None,
) -> go.Figure:
    """Returns a layer x position map of one request's lens readings Z.

    hypotheses: from `Trace.hypotheses`.  colour: log-probability of the committed token, the layer's entropy (both in
    nats), or the committed token's rank (0 is first).  include: the canonical rows, or also superseded and rolled-back
    rows, each as a column of its own.  positions: of input tokens; all by default.
    A cell names the layer's most likely token, outlined in green if it is the committed token. The reading at position
    p predicts the token at p + 1. Below each column: p, the input token, → the token committed at p + 1. layout.meta
    lists the rows, positions and layers of the cells. Cells of rows whose input was a rejected or given-up token are
    grey, unless the colour is the entropy: no committed token can be compared with them.
    Raises: ValueError if no reading is selected.  Source: logit lens (nostalgebraist 2020).
    """
    rows = select(hypotheses, request_id, include, positions)
    columns = columns_of(rows)
    layers = np.sort(rows.layer.unique())
    rows = rows.assign(column=rows.row.map(pd.Series(columns.index, index=columns.row)))
    heat = _heatmap(rows, columns, layers, scale_of(rows, colour))
    grey = _taken_out(heat)
    figure = Figure([heat, _outlines(rows, layers), *_status_marks(columns, len(layers)), *grey])
    third_row = 20 if grey and set(MARKS) <= set(columns.status) else 0  # of the legend, below the title
    ticks = range(0, len(layers), 1 if len(layers) <= 16 else 2)
    figure.update_layout(
        template=layout_template(),
        title=dict(
            text=finding(hypotheses[hypotheses.request_id == request_id], request_id),
            y=1,
            yref="container",
            yanchor="top",
            pad=dict(t=14),
        ),
        height=max(_CELL[1] * len(layers), _LOWEST) + 180 + third_row,
        margin=dict(t=78 + third_row, b=85, l=56, r=20),
        legend=dict(y=1.01),
        dragmode=False,
        meta=dict(rows=columns.row.tolist(), positions=columns.position.tolist(), layers=layers.tolist()),
    )
    figure.update_xaxes(
        title=BELOW,
        tickmode="array",
        tickvals=list(columns.index),
        ticktext=["<br>".join(map(markup, column_label(c))) for c in columns.itertuples()],
        tickangle=0,
        tickfont=dict(size=11),
        showgrid=False,
        range=[-0.5, len(columns) - 0.5],
    )
    figure.update_yaxes(
        title="layer",
        tickmode="array",
        tickvals=list(ticks),
        ticktext=[str(layers[i]) for i in ticks],
        showgrid=False,
        range=[-0.5, len(layers) - 0.5],
    )
    return figure


def grid_width(figure: go.Figure) -> int:
    """Returns the least width in pixels at which a grid's tokens are readable; a narrower page scrolls the grid."""
    return _CELL[0] * len(figure.data[0].x) + 150


def _heatmap(rows: pd.DataFrame, columns: pd.DataFrame, layers: np.ndarray, scale: Scale) -> go.Heatmap:
    def grid(values: pd.Series) -> np.ndarray:
        """Returns [layers, columns]: the value of each cell."""
        table = rows.assign(value=values).pivot(index="layer", columns="column", values="value")
        return table.reindex(index=layers, columns=columns.index).to_numpy()

    places, names = zip(*scale.ticks, strict=True)
    first = rows.token.map(lambda token: markup(token_label(token, TOKEN_COLUMNS)))
    return go.Heatmap(
        x=list(columns.index),
        y=list(range(len(layers))),
        z=grid(scale.values),
        zmin=scale.low,
        zmax=scale.high,
        reversescale=scale.is_reversed,
        colorbar=dict(
            title=dict(text="<br>".join(textwrap.wrap(scale.title, 26)), side="right", font=dict(size=12)),
            tickvals=places,
            ticktext=names,
            thickness=12,
            x=1.01,
        ),
        text=_blank_where_missing(grid(first)),
        texttemplate="%{text}",
        textfont=dict(size=11),
        hovertext=_blank_where_missing(grid(_hover(rows))),
        hovertemplate="%{hovertext}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
        name="lens readings",
    )


def _taken_out(heat: go.Heatmap) -> list[go.Heatmap | go.Scatter]:
    """Returns grey cells, with the texts of `heat`, for readings without a value for the colour, and their legend."""
    texts = np.asarray(heat.text, dtype=object)
    is_grey = np.isnan(np.asarray(heat.z, dtype=float)) & (texts != "")
    if not is_grey.any():
        return []
    cells = go.Heatmap(heat).update(
        z=np.where(is_grey, 0.0, np.nan), zmin=0, zmax=1, colorscale=[[0, _GREY], [1, _GREY]], reversescale=False,
        showscale=False, text=np.where(is_grey, texts, ""), name=NOT_COMPARED,
    )  # fmt: skip
    heat.text = np.where(is_grey, "", texts)  # plotly writes the text of a cell without a colour too
    mark = go.Scatter(
        x=[None], y=[None], mode="markers", marker=dict(symbol="square", size=11, color=_GREY), name=NOT_COMPARED,
        hoverinfo="skip",
    )  # fmt: skip
    return [cells, mark]


def _blank_where_missing(texts: np.ndarray) -> np.ndarray:
    """Replaces missing texts by "", since plotly would print "null" for a layer that a drafter did not run."""
    return np.where(pd.isna(texts), "", texts)


def _hover(rows: pd.DataFrame) -> pd.Series:
    """Returns the hover text of every cell: row, tokens in full, numbers."""

    def line(row: TableLine) -> str:
        """Returns the hover text of one reading."""
        choice = f"first choice <b>{markup(visible(row.token))}</b>, log p {row.logprob_nats:.2f} nats"
        if row.status in DISCARDED_DRAFT:
            target = NOTHING_TO_COMPARE
        elif pd.isna(row.committed_token):
            target = "nothing was committed there"
        else:
            target = (
                f"committed <b>{markup(visible(row.committed_token))}</b>, rank {row.rank}, "
                f"log p {row.committed_logprob_nats:.2f} nats"
            )
        return (
            f"{markup(column_words(row))}<br>request {row.request_id} · step {row.step} · {row.phase}<br>"
            f"{row.role} · {row.status} · {reads_and_predicts(row.position)} · layer {row.layer}<br>"
            f"{choice}<br>{target}<br>entropy {row.entropy_nats:.2f} nats"
        )

    return pd.Series([line(row) for row in rows.itertuples()], index=rows.index, dtype=object)


def _outlines(rows: pd.DataFrame, layers: np.ndarray) -> go.Scatter:
    """Returns one box around every run of layers whose most likely token is the committed one."""
    places = {layer: place for place, layer in enumerate(layers)}
    x: list[float | None] = []
    y: list[float | None] = []
    agreeing = rows[rows.agrees.fillna(False).astype(bool) & ~rows.status.isin(DISCARDED_DRAFT)]
    for column, group in agreeing.groupby("column"):
        for start, end in runs_of(sorted(places[layer] for layer in group.layer)):
            left, right, low, high = column - 0.46, column + 0.46, start - 0.44, end + 0.44
            x += [left, right, right, left, left, None]
            y += [low, low, high, high, low, None]
    return go.Scatter(
        x=x, y=y, mode="lines", line=dict(color=STATUS_STYLES["committed"]["color"], width=2),
        name="first choice = committed token", showlegend=True, hoverinfo="skip",
    )  # fmt: skip


def _status_marks(columns: pd.DataFrame, num_layers: int) -> list[go.Scatter]:
    """Returns one Plotly trace for each status other than `committed`: bars above the columns of that status."""
    marks = []
    for status, name in MARKS.items():
        places = columns.index[columns.status == status]
        if len(places):
            edges = [(place - 0.45, place + 0.45, None) for place in places]
            marks.append(
                go.Scatter(
                    x=[edge for three in edges for edge in three],
                    y=[num_layers - 0.5, num_layers - 0.5, None] * len(places),
                    mode="lines",
                    line=dict(color=STATUS_STYLES[status]["color"], width=6),
                    name=name,
                    hoverinfo="skip",
                    cliponaxis=False,
                )
            )
    return marks
