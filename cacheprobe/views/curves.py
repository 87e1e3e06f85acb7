"""Draws two figures of a whole run: agreement by layer for accepted and rejected drafts, and prediction depths."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.analysis.measures import prediction_depth_by_verdict, with_groups
from cacheprobe.core.values import TableLine
from cacheprobe.trace.tables.draft_verdicts import NOT_DRAFTED, parting, shares_by_verdict
from cacheprobe.views.style import STATUS_STYLES, Figure, layer_ticks, set_layout
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
        figure.add_scatter(
            x=lines.layer.tolist(), y=lines[column].tolist(), mode="lines+markers",
            name=f"{name} ({lines.rows.max()} readings)",
            line=dict(color=STATUS_STYLES[style]["color"], dash=dash, width=2),
            marker=dict(symbol=STATUS_STYLES[style]["symbol"], size=7),
            hovertemplate=f"{name}, layer %{{x}}: first choice in %{{y:.1%}} of the readings<extra></extra>",
        )  # fmt: skip
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
    known = with_groups(depths)
    if known.empty:
        raise ValueError(
            "the table of prediction depths is empty, or every row was fed a draft in vain; a run that reads Z fills it"
        )
    figure = Figure()
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
    set_layout(figure, _depth_finding(depths), 100 + 74 * len(figure.data), top=56, dragmode=False)
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
