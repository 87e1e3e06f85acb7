"""Draws curves of any table: draft tokens accepted, by layer or by place in the draft; and one column of numbers."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import Figure, layer_ticks, set_layout
from cacheprobe.views.text import markup, shorten

COLOURS = ("#7c5fbd", "#c2702b", "#2b8cbe", "#2f9e4f", "#d9483b", "#c58f00", "#7b858f", "#b1479b")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")
MOST_CURVES = 8
_NEEDED = ["drafter", "layer", "window", "temperature", "kind", "drafted", "accepted"]


def acceptance_curves(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure of the tables of `cp.analysis.acceptance`.

    by="request": tokens that a verify pass commits, over all requests: a curve by layer for each window and temperature
    of EarlyExit, and a dotted level for each other drafter. by="place": the share of accepted draft tokens, a curve by
    place in the draft. Of more than 8 curves, the first 8 are drawn. Dashed curves are estimates.
    Raises: ValueError for an empty table, and for another one.
    """
    is_by_place = "place" in table.columns
    needed = [*_NEEDED, *(() if is_by_place else ("passes", "committed"))]
    if lacking := [name for name in needed if name not in table.columns]:
        raise ValueError(f"the table has no column {lacking[0]}; give one from cp.analysis.acceptance(trace, ...)")
    if table.empty:
        raise ValueError("the table of acceptance is empty; replay at least one request")
    return _by_place(table) if is_by_place else _by_layer(table)


def _by_layer(table: pd.DataFrame) -> go.Figure:
    """Returns the figure of tokens per pass by layer."""
    keys = ["drafter", "settings", "layer", "window", "temperature", "kind"]
    summed = table.groupby(keys, dropna=False, sort=False, as_index=False)[["passes", "committed"]].sum()
    summed["tokens_per_pass"] = summed.committed / summed.passes
    summed["name"] = [_name(line) for line in summed.itertuples()]
    figure, layers = Figure(), summed.layer.dropna()
    groups = list(summed.groupby("name", sort=False))
    for i, (name, lines) in enumerate(groups[:MOST_CURVES]):
        is_level = bool(lines.layer.isna().all())
        x = [layers.min(), layers.max()] if is_level and len(layers) else [0, 1] if is_level else lines.layer.tolist()
        y = [lines.tokens_per_pass.iloc[0]] * 2 if is_level else lines.tokens_per_pass.tolist()
        _add(figure, i, str(name), x, y, "dot" if is_level else _dash(lines), "layer %{x}: %{y:.2f} tokens a pass")
    best = summed.loc[summed.tokens_per_pass.idxmax()]
    title = f"Most tokens a pass: {best.tokens_per_pass:.2f}, by {_place_of(best)}, window {best.window}"
    _finish(figure, title, len(groups))
    figure.update_xaxes(title="layer of the early exit", **(layer_ticks(layers) if len(layers) else {}))
    figure.update_yaxes(title="tokens committed in a verify pass", rangemode="tozero")
    return figure


def _by_place(table: pd.DataFrame) -> go.Figure:
    """Returns the figure of acceptance by place in the draft."""
    table = table.assign(share=table.accepted / table.drafted)
    table["name"] = [_name(line, has_layer=True) for line in table.itertuples()]
    figure, groups = Figure(), list(table.groupby("name", sort=False))
    for i, (name, lines) in enumerate(groups[:MOST_CURVES]):
        lines = lines.sort_values("place")
        what = "position %{x} in the draft: %{y:.1%} accepted"
        _add(figure, i, str(name), lines.place.tolist(), lines.share.tolist(), _dash(lines), what)
    first = table[table.place == table.place.min()]
    best = first.loc[first.share.idxmax()]
    title = f"First draft token accepted at most in {best.share:.0%}, by {_place_of(best)}"
    _finish(figure, title, len(groups))
    figure.update_xaxes(title="position in the draft", dtick=max(1, int(table.place.max()) // 8))
    figure.update_yaxes(title="share of draft tokens accepted", tickformat=".0%", range=[-0.02, 1.04])
    return figure


def _add(figure: go.Figure, i: int, name: str, x: list, y: list, dash: str, what: str) -> None:
    """Adds one curve. what: the words of the pointer, with plotly's places for the numbers."""
    figure.add_scatter(
        x=x, y=y, mode="lines+markers", name=markup(shorten(name, 60)),
        line=dict(color=COLOURS[i], dash=dash, width=2), marker=dict(symbol=SYMBOLS[i], size=6),
        hovertemplate=f"{markup(name)}<br>{what}<extra></extra>",
    )  # fmt: skip


def _finish(figure: go.Figure, title: str, num_curves: int) -> None:
    """Sets title and layout; the title says how many curves are left out."""
    more = f"; {num_curves - MOST_CURVES} curves are left out" if num_curves > MOST_CURVES else ""
    legend = dict(orientation="h", x=0, y=-0.2, yanchor="top")
    set_layout(
        figure, f"{title}{more}", 420, top=56, bottom=130, left=52, legend=legend, dragmode=False, showlegend=True
    )


def _dash(lines: pd.DataFrame) -> str:
    """Returns the dash of a curve: solid if exact."""
    return "solid" if (lines.kind == "exact").all() else "dash"


def _name(line: object, has_layer: bool = False) -> str:
    """Returns the name of the curve that a line belongs to. has_layer: the curve is of one layer."""
    drafter, layer, kind = (getattr(line, name) for name in ("drafter", "layer", "kind"))
    window, temperature = getattr(line, "window"), getattr(line, "temperature")  # noqa: B009
    settings = getattr(line, "settings", None)
    own = settings if isinstance(settings, str) else drafter
    place = f", layer {layer}" if has_layer and not pd.isna(layer) else ""
    heat = f", temperature {temperature:g}" if temperature else ""
    return f"{own}{place}, window {window}{heat}{'' if kind == 'exact' else ', ' + str(kind)}"


def _place_of(line: pd.Series) -> str:
    """Returns the drafter of a line with its layer, if it has one, as text of a title."""
    return markup(str(line.drafter)) + ("" if pd.isna(line.layer) else f" at layer {line.layer}")
