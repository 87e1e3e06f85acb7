"""Layer by position: what every layer would have said, against what was committed."""

from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import STATUS_STYLES, Figure, layout_template
from cacheprobe.views.text import markup, token_label, visible

Measure = Literal["logprob", "entropy", "rank"]

_CELL = (50, 19)
"""Pixels of a cell."""
_TOKEN_COLUMNS = 6
_FLOOR_NATS = -12.0
"""Log-probabilities below this share one colour: what matters happens above."""
_RANK_TICKS = (0, 9, 99, 999, 9999)
_SIGNS = {"committed": "", "candidate": "◇ ", "rolled_back": "✗ "}


def lens_grid(
    hypotheses: pd.DataFrame,
    request_id: int,
    *,
    colour: Measure = "logprob",
    include: Literal["committed", "all"] = "committed",
    positions: range | None = None,
) -> go.Figure:
    """Layer x position map of one request's lens readings Z.

    hypotheses: as in `Trace.hypotheses`.  colour: log-probability of the committed token, the layer's entropy (both in
    nats), or the committed token's rank (0 is first).  include: the canonical rows, or the candidates' and those rolled
    back too, as columns of their own.  positions: of input tokens; all by default.
    Cells name the layer's first choice; it is outlined in green where it is the committed token. The reading at
    position p speaks of the token at p + 1, which stands below the column. layout.meta says which rows, positions and
    layers the cells are.
    Raises: ValueError where nothing is selected.  Source: logit lens (nostalgebraist 2020).
    """
    if colour not in ("logprob", "entropy", "rank"):
        raise ValueError(f"unknown colour {colour!r}; it is 'logprob', 'entropy' or 'rank'")
    if include not in ("committed", "all"):
        raise ValueError(f"unknown include {include!r}; it is 'committed' or 'all'")
    rows = _select(hypotheses, request_id, include, positions)
    columns = _columns(rows)
    layers = np.sort(rows.layer.unique())
    rows = rows.assign(column=rows.row.map(pd.Series(columns.index, index=columns.row)))
    heat, bar = _heatmap(rows, columns, layers, colour)
    figure = Figure([heat, _outlines(rows, layers), *_status_marks(columns, len(layers))])
    ticks = range(0, len(layers), 1 if len(layers) <= 16 else 2)
    figure.update_layout(
        template=layout_template(),
        title=dict(text=finding(rows, request_id), y=1, yref="container", yanchor="top", pad=dict(t=14)),
        height=_CELL[1] * len(layers) + 165,
        margin=dict(t=78, b=70, l=56, r=20),
        legend=dict(y=1.01),
        dragmode=False,
        meta=dict(rows=columns.row.tolist(), positions=columns.position.tolist(), layers=layers.tolist()),
    )
    figure.update_xaxes(
        title="position p (tokens) · committed token at p + 1",
        tickmode="array",
        tickvals=list(columns.index),
        ticktext=[_tick(column) for column in columns.itertuples()],
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
    figure.update_traces(colorbar=bar, selector=dict(type="heatmap"))
    return figure


def grid_width(figure: go.Figure) -> int:
    """Pixels below which a grid's tokens can no longer be read; a page scrolls it sideways then."""
    return _CELL[0] * len(figure.data[0].x) + 150


def finding(rows: pd.DataFrame, request_id: int) -> str:
    """From which layer on the first choice is the committed token, as a sentence: the median over canonical rows."""
    known = rows[(rows.status == "committed") & rows.agrees.notna()]
    if known.empty:
        return f"Request {request_id}: no committed token to compare with"
    firsts = known.groupby("row")[["layer", "agrees"]].apply(_agrees_from)
    median = firsts.sort_values().iloc[len(firsts) // 2]
    if median == np.inf:
        return f"Request {request_id}: at most positions no layer settles on the committed token"
    return f"Request {request_id}: the committed token is the first choice from layer {int(median)} on (median)"


def _agrees_from(reading: pd.DataFrame) -> float:
    """First layer from which every first choice is the committed token; infinity where the last one is another."""
    reading = reading.sort_values("layer")
    misses = reading.layer[~reading.agrees.astype(bool)]
    after = reading.layer if misses.empty else reading.layer[reading.layer > misses.max()]
    return float("inf") if after.empty else float(after.min())


def _select(hypotheses: pd.DataFrame, request_id: int, include: str, positions: range | None) -> pd.DataFrame:
    own = hypotheses[hypotheses.request_id == request_id]
    rows = own if include == "all" else own[own.status == "committed"]
    if positions is not None:
        rows = rows[rows.position.isin(positions)]
    if not rows.empty:
        return rows
    if own.empty:
        there = f"the table has requests {sorted(hypotheses.request_id.unique().tolist())}"
    else:
        counts = own.drop_duplicates("row").status.value_counts().to_dict()
        there = f"it has {counts} rows at positions {own.position.min()} to {own.position.max()}"
    wanted = "" if positions is None else f" at positions {positions.start} to {positions.stop - 1}"
    raise ValueError(f"no {include} hypotheses of request {request_id}{wanted}; {there}")


def _columns(rows: pd.DataFrame) -> pd.DataFrame:
    """One line for each column of the picture: by position, the canonical row first, then as they were computed."""
    order = rows.status.map({"committed": 0, "candidate": 1, "rolled_back": 2})
    columns = rows.assign(order=order).drop_duplicates("row").sort_values(["position", "order", "step", "row"])
    return columns.reset_index(drop=True)


def _tick(column: Any) -> str:
    token = "—" if pd.isna(column.committed_token) else token_label(column.committed_token, _TOKEN_COLUMNS)
    return f"{_SIGNS[column.status]}{column.position}<br>{markup(token)}"


def _heatmap(
    rows: pd.DataFrame, columns: pd.DataFrame, layers: np.ndarray, colour: str
) -> tuple[go.Heatmap, dict[str, object]]:
    def grid(values: pd.Series) -> np.ndarray:
        table = rows.assign(value=values).pivot(index="layer", columns="column", values="value")
        return table.reindex(index=layers, columns=columns.index).to_numpy()

    scale: dict[str, object]
    rank = rows["rank"].astype("Float64").to_numpy(dtype=float, na_value=np.nan)
    if colour == "logprob":
        values = rows.committed_logprob_nats.astype(float).where(rows["rank"].notna())
        scale = dict(zmin=_FLOOR_NATS, zmax=0)
        bar = dict(title="log p of the committed token (nats)", tickvals=[-12, -9, -6, -3, 0])
        bar["ticktext"] = ["≤ −12", "−9", "−6", "−3", "0"]
    elif colour == "entropy":
        values = rows.entropy_nats.astype(float)
        scale = dict(zmin=0, reversescale=True)
        bar = dict(title="entropy (nats)")
    else:
        values = pd.Series(np.log10(rank + 1), index=rows.index)
        ticks = [np.log10(tick + 1) for tick in _RANK_TICKS]
        scale = dict(zmin=0, zmax=ticks[-1], reversescale=True)
        bar = dict(title="rank of the committed token", tickvals=ticks, ticktext=[str(tick) for tick in _RANK_TICKS])
    bar |= dict(title=dict(text=bar["title"], side="right"), thickness=12, x=1.01)
    first = rows.token.map(lambda token: markup(token_label(token, _TOKEN_COLUMNS)))
    heat = go.Heatmap(
        x=list(columns.index),
        y=list(range(len(layers))),
        z=grid(values),
        text=_blank_where_missing(grid(first)),
        texttemplate="%{text}",
        textfont=dict(size=11),
        hovertext=_blank_where_missing(grid(_hover(rows))),
        hovertemplate="%{hovertext}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
        name="lens readings",
        **scale,
    )
    return heat, bar


def _blank_where_missing(texts: np.ndarray) -> np.ndarray:
    """A layer that a drafter did not run has no text; plotly would print "null"."""
    return np.where(pd.isna(texts), "", texts)


def _hover(rows: pd.DataFrame) -> pd.Series:
    """Provenance and numbers of every cell, tokens in full."""

    def line(row: Any) -> str:
        choice = f"first choice <b>{markup(visible(row.token))}</b>, log p {row.logprob_nats:.2f} nats"
        if pd.isna(row.committed_token):
            target = "nothing was committed there"
        else:
            target = (
                f"committed <b>{markup(visible(row.committed_token))}</b>, rank {row.rank}, "
                f"log p {row.committed_logprob_nats:.2f} nats"
            )
        return (
            f"request {row.request_id} · step {row.step} · {row.phase}<br>{row.role} · {row.status} · position "
            f"{row.position} · layer {row.layer}<br>{choice}<br>{target}<br>entropy {row.entropy_nats:.2f} nats"
        )

    return pd.Series([line(row) for row in rows.itertuples()], index=rows.index, dtype=object)


def _outlines(rows: pd.DataFrame, layers: np.ndarray) -> go.Scatter:
    """One box around every run of layers whose first choice is the committed token."""
    places = {layer: place for place, layer in enumerate(layers)}
    x: list[float | None] = []
    y: list[float | None] = []
    agreeing = rows[rows.agrees.fillna(False).astype(bool)]
    for column, group in agreeing.groupby("column"):
        held = sorted(places[layer] for layer in group.layer)
        starts = [place for place in held if place - 1 not in held]
        ends = [place for place in held if place + 1 not in held]
        for start, end in zip(starts, ends, strict=True):
            left, right, low, high = column - 0.46, column + 0.46, start - 0.44, end + 0.44
            x += [left, right, right, left, left, None]
            y += [low, low, high, high, low, None]
    return go.Scatter(
        x=x, y=y, mode="lines", line=dict(color=STATUS_STYLES["committed"]["color"], width=2),
        name="first choice = committed token", showlegend=True, hoverinfo="skip",
    )  # fmt: skip


def _status_marks(columns: pd.DataFrame, num_layers: int) -> list[go.Scatter]:
    """A bar over the columns that are not canonical."""
    marks = []
    for status, name in (("candidate", "◇ candidate row"), ("rolled_back", "✗ rolled-back row")):
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
