"""Draws curves: agreement by layer for accepted and rejected drafts, prediction depths, accepted draft tokens by layer
or place, and one column of numbers of any table."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.analysis.measures import prediction_depth_by_verdict, with_groups
from cacheprobe.core.values import TableLine
from cacheprobe.trace.tables.draft_verdicts import NOT_DRAFTED, drafter_layers, parting, shares_by_verdict
from cacheprobe.views.style import (
    GREY,
    STATUS_STYLES,
    Figure,
    curve,
    error_bars,
    layer_ticks,
    mark_layer,
    require_lines,
    set_layout,
)
from cacheprobe.views.text import markup, shorten

_MOST_POINTS = 600
"""Largest number of rows that are all drawn as points; with more rows, only the outliers are drawn."""

_LINES = (
    ("accepted", "committed_first", "draft accepted", "committed", "solid"),
    ("rejected", "committed_first", "draft rejected: the committed token", "rolled_back", "solid"),
    ("rejected", "drafted_first", "draft rejected: the drafted token", "rolled_back", "dot"),
    (NOT_DRAFTED, "committed_first", "nothing drafted", "superseded", "dash"),
)
"""Verdict, column of the shares, name, style and dash of each line of `draft_verdicts`."""


def draft_verdicts(hypotheses: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with lines by layer: the share of lens readings whose most likely token is the committed
    token. Accepted drafts, rejected drafts, and readings whose pass had no draft token for the next position have a
    line each; rejected drafts have a second one, for the draft token.

    Readings of the draft pass and of the verify pass both count. Left out are draft tokens without a verdict, and rows
    that were fed a draft token that was never committed.
    hypotheses: from `Trace.hypotheses`; lines of thoughts are left out.
    Raises: ValueError if no reading is left that has a committed token.
    """
    shares = shares_by_verdict(hypotheses[hypotheses.site != "thought"])
    figure = Figure()
    for verdict, column, name, style, dash in _LINES:
        lines = shares[shares.verdict == verdict]
        if lines.empty:
            continue
        hover = f"{name}, layer %{{x}}: first choice in %{{y:.1%}} of the readings"
        of_line = {**STATUS_STYLES[style], "dash": dash}
        curve(figure, lines, column, f"{name} ({lines.rows.max()} readings)", hover, of_line)
    for layer in drafter_layers(hypotheses):
        mark_layer(figure, layer, "drafter's layer: the draft token is first by construction", 1.0)
    last = shares[shares.layer == shares.layer.max()]
    if (last.committed_first == 1).all():
        meaning = "last layer: the committed token is first by construction"
        mark_layer(figure, int(last.layer.iloc[0]), meaning, 1.0, "dashdot")
    below = dict(orientation="h", x=0, y=-0.18, yanchor="top")  # on a narrow page it has a line for each entry
    set_layout(figure, parting(shares), 440, top=56, bottom=130, legend=below, dragmode=False)
    figure.update_xaxes(title="layer", **layer_ticks(shares.layer))
    figure.update_yaxes(title="share of readings", tickformat=".0%", range=[-0.02, 1.04])
    return figure


_BOXES = {
    "draft rejected, draft pass": "rolled_back",
    "draft accepted, draft pass": "committed",
    "nothing drafted": "superseded",
    "draft rejected, verify pass": "rolled_back",
    "draft accepted, verify pass": "committed",
}
"""Groups of `prediction_depth_figure` and their styles; the last is drawn on top."""


def prediction_depth_figure(depths: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure of box plots of each row's prediction depth: the first layer from which the most likely
    token no longer changes. Rows are grouped by their pass (draft or verify) and by the verdict on the draft token at
    the next position; rows without such a draft token are one group.

    depths: from `cp.analysis.prediction_depth`. Rows of a draft pass have boxes of their own: a drafter may stop at an
    early layer, which limits the depth. Left out are draft tokens without a verdict, and rows that were fed a draft
    token that was never committed.
    Raises: ValueError if no row is left to draw.
    """
    known, figure = with_groups(depths), Figure()
    empty = "the table of prediction depths is empty, or every row was fed a draft in vain; a run that reads Z fills it"
    require_lines(known, empty)
    points = "all" if len(known) <= _MOST_POINTS else "outliers"
    for name, status in _BOXES.items():
        rows, style = known[known.group == name], STATUS_STYLES[status]
        if rows.empty:
            continue
        figure.add_box(
            x=rows.prediction_depth.tolist(),
            name=f"{name.replace(', ', ',<br>')}<br>({len(rows)} rows)",
            orientation="h", boxpoints=points, jitter=0.7, pointpos=0,
            marker=dict(color=style["color"], symbol=style["symbol"], size=4, opacity=0.55),
            line=dict(color=style["color"], width=2),
            fillcolor="rgba(128,128,128,0.12)",
            hovertext=[_hover(row) for row in rows.itertuples()],
            hoverinfo="text", hoveron="points", showlegend=False,
        )  # fmt: skip
    set_layout(figure, _depth_finding(depths), 120 + 74 * len(figure.data), top=76, dragmode=False)
    ends = known[["phase", "last_layer"]] if "last_layer" in known.columns else known.iloc[:0].assign(last_layer=0)
    for layer in sorted(set(ends.last_layer[(ends.phase == "decode") & (ends.last_layer < ends.last_layer.max())])):
        words = f"layer {layer}, where draft passes end"
        line = dict(color=GREY, dash="dot", width=1.5)
        figure.add_vline(x=int(layer), line=line, annotation_text=words, annotation_position="top")
    figure.update_xaxes(title="prediction depth (layer)", **layer_ticks(known.prediction_depth))
    return figure


def _depth_finding(depths: pd.DataFrame) -> str:
    median_of, medians = prediction_depth_by_verdict(depths).prediction_depth_median, []
    for name, group_words in (
        ("draft accepted, verify pass", "accepted drafts"),
        ("draft rejected, verify pass", "rejected drafts"),
        ("nothing drafted", "positions without a draft"),
    ):
        if name in median_of:
            medians.append(f"{group_words} at layer {median_of[name]:g}")
    return f"Median prediction depth: {', '.join(medians)}" if medians else "Prediction depth"


def _hover(row: TableLine) -> str:
    return (
        f"request {row.request_id} · step {row.step} · {row.phase} · {row.status} · reads position {row.position}, "
        f"predicts {row.position + 1}<br>prediction depth: layer {row.prediction_depth}, {row.num_flips} changes of "
        f"first choice<br>{markup(shorten(row.path, 160))}"
    )


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
    require_lines(table, "the table of acceptance is empty; replay at least one request")
    lines, x, title, hover = _by_place(table) if is_by_place else _by_layer(table)
    figure, layers, groups = Figure(), lines.layer.dropna(), list(lines.groupby("name", sort=False))
    for i, (name, own) in enumerate(groups[:MOST_CURVES]):
        dash = "solid" if (own.kind == "exact").all() else "dash"
        if not is_by_place and own.layer.isna().all():  # a level for a drafter without a layer
            ends = [layers.min(), layers.max()] if len(layers) else [0, 1]
            own, dash = pd.DataFrame({"layer": ends, "value": own.value.iloc[0]}), "dot"
        _add(figure, i, str(name), own, "value", dash, hover, x)
    title, legend = (
        title + _left_out(len(groups) - MOST_CURVES, "curves"),
        dict(orientation="h", x=0, y=-0.2, yanchor="top"),
    )
    set_layout(figure, title, 420, top=56, bottom=130, left=52, legend=legend, dragmode=False, showlegend=True)
    if is_by_place:
        figure.update_xaxes(title="position in the draft", dtick=max(1, int(table.place.max()) // 8))
        figure.update_yaxes(title="share of draft tokens accepted", tickformat=".0%", range=[-0.02, 1.04])
    else:
        figure.update_xaxes(title="layer of the early exit", **(layer_ticks(layers) if len(layers) else {}))
        figure.update_yaxes(title="tokens committed in a verify pass", rangemode="tozero")
    return figure


def _by_layer(table: pd.DataFrame) -> tuple[pd.DataFrame, str, str, str]:
    """Returns (lines with value, the tokens per pass over all requests, and name, that of their curve; column of the
    horizontal axis; title; hover text)."""
    keys = ["drafter", "settings", "layer", "window", "temperature", "kind"]
    summed = table.groupby(keys, dropna=False, sort=False, as_index=False)[["passes", "committed"]].sum()
    summed["value"] = summed.committed / summed.passes
    summed["name"] = [_name(line) for line in summed.itertuples()]
    best = summed.loc[summed.value.idxmax()]
    title = f"Most tokens a pass: {best.value:.2f}, by {_place_of(best)}, window {best.window}"
    return summed, "layer", title, "layer %{x}: %{y:.2f} tokens a pass"


def _by_place(table: pd.DataFrame) -> tuple[pd.DataFrame, str, str, str]:
    """Returns the same as `_by_layer` for acceptance by place in the draft."""
    lines = table.assign(value=table.accepted / table.drafted).sort_values("place", kind="stable")
    lines["name"] = [_name(line, has_layer=True) for line in lines.itertuples()]
    first = lines[lines.place == lines.place.min()]
    best = first.loc[first.value.idxmax()]
    title = f"First draft token accepted at most in {best.value:.0%}, by {_place_of(best)}"
    return lines, "place", title, "position %{x} in the draft: %{y:.1%} accepted"


def _add(
    figure: go.Figure, i: int, name: str, lines: pd.DataFrame, column: str, dash: str, hover: str,
    x: str = "layer", /, **settings: object,
) -> None:  # fmt: skip
    """Adds curve number `i` of a column. hover: with plotly's places for the numbers.  x, settings: as in `curve`."""
    style = {"color": COLOURS[i], "symbol": SYMBOLS[i], "dash": dash}
    curve(figure, lines, column, markup(shorten(name, 60)), f"{markup(name)}<br>{hover}", style, x, **settings)


def _name(line: TableLine, has_layer: bool = False) -> str:
    """Returns the name of the curve that a line belongs to. has_layer: the curve is of one layer."""
    settings = getattr(line, "settings", None)
    own = settings if isinstance(settings, str) else line.drafter
    place = f", layer {line.layer}" if has_layer and not pd.isna(line.layer) else ""
    heat = f", temperature {line.temperature:g}" if line.temperature else ""
    return f"{own}{place}, window {line.window}{heat}{'' if line.kind == 'exact' else f', {line.kind}'}"


def _place_of(line: pd.Series) -> str:
    """Returns the drafter of a line with its layer, if it has one, as text of a title."""
    return markup(str(line.drafter)) + ("" if pd.isna(line.layer) else f" at layer {line.layer}")


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
    require_lines(known, f"no line of the table has a value of {column}")
    across, figure = _across(table), Figure()
    left_out = _draw_curves(figure, known, column, across) if across else _draw_bars(figure, known, column)
    low, high = known[column].min(), known[column].max()
    by = f" by {across}" if across else ""
    title = f"{markup(column)}{by}: from {low:.4g} to {high:.4g}{left_out}"
    set_layout(figure, title, 380, top=72, bottom=60, left=52, dragmode=False)
    figure.update_yaxes(title=markup(column.removesuffix("_nats") + " (nats)" * column.endswith("_nats")))
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
        error_y = error_bars(lines, column) if _has_interval(table, column) else None
        more = dict(mode=mode, error_y=error_y, showlegend=len(names) > 1)
        _add(figure, i, name, lines, column, "solid", f"{across} %{{x}}: %{{y:.4g}}", across, **more)
    figure.update_xaxes(title=across, **(layer_ticks(table[across]) if across == "layer" else {}))
    return _left_out(len(names) - MOST_CURVES, "curves")


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
    return _left_out(len(table) - len(lines), "lines")


def _left_out(count: int, what: str) -> str:
    """Returns what a title says of curves or lines that are not drawn; "" for none."""
    return f"; {count} {what} are left out" if count > 0 else ""


def _groups(table: pd.DataFrame, most: int = MOST_CURVES) -> pd.Series:
    """Returns a name for each line: its values of those columns of short texts, in their order, that have several
    values and together at most `most` combinations."""
    chosen: list[str] = []
    for name in map(str, table.columns):
        is_text = table[name].map(lambda value: isinstance(value, str)).all()
        if not is_text or table[name].nunique() < 2 or table[name].str.len().max() > 60:
            continue
        if table[[*chosen, name]].drop_duplicates().shape[0] <= most:
            chosen.append(name)
    if not chosen:
        return pd.Series("", index=table.index)
    return table[chosen].astype(str).agg(", ".join, axis=1)


def _has_interval(table: pd.DataFrame, column: str) -> bool:
    """Returns True if the columns low and high enclose every value of a column."""
    if not {"low", "high"} <= set(table.columns) or column in ("low", "high"):
        return False
    return bool(((table.low <= table[column]) & (table[column] <= table.high)).all())
