"""Draws the logit attribution of one token: bars by layer for T (attention) and C (MLP), and a map of the heads."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.core.hook_names import site_label
from cacheprobe.views.style import Figure, layout_template, zero_centred
from cacheprobe.views.text import markup, visible

_COLOURS = {"T": "#2b6cb0", "C": "#a87900", "other": "#7b858f"}
_PART_NAMES = {"T": "T, attention", "C": "C, MLP", "T bias": "T, its bias", "embed": "the embedding",
               "rest": "the rest"}  # fmt: skip
_PART_COLOURS = ["#bd3127", "#f4a59d", "#f7f7f7", "#9cc0ea", "#2b6cb0"]
"""Colours from negative to positive parts of a logit; the middle is zero."""


def attribution(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure of the parts that sum to one token's logit. Bars by layer show T (attention) and C (MLP);
    other bars show parts without a layer, such as the embedding. If the table has heads, a heat map by head and layer
    is below.

    table: from `cp.analysis.attribution`, of one row of the trace. With two tokens, the figure shows the first token's
    logit minus the second token's. The heads of a layer sum to its T if T has no bias.
    Raises: ValueError for an empty table, more than one row, or more than two tokens.
    """
    parts, logit_name = _parts_of_logit(table)
    by_head = parts[parts["head"].notna()]
    has_heads = bool(len(by_head))
    heights = dict(vertical_spacing=0.08, row_heights=[0.5, 0.5]) if has_heads else {}
    figure = make_subplots(rows=1 + has_heads, shared_xaxes=True, figure=Figure(), **heights)
    row = parts.iloc[0]
    about_row = f"request {row.request_id} · {row.status.replace('_', ' ')} row · position {row.position}"
    hover_end = f"<br>{about_row}<extra></extra>"
    in_layers = parts[parts.layer.notna()].assign(site=lambda t: t.site.replace("T bias", "T"))
    sums = in_layers.groupby(["site", "layer"]).logit.sum()
    for site in ("T", "C"):
        values = sums[site]
        hover = f"{_PART_NAMES[site]} of layer %{{x}}: %{{y:+.3f}} logits{hover_end}"
        about = dict(name=site_label(site), marker_color=_COLOURS[site], hovertemplate=hover)
        figure.add_bar(x=[int(layer) for layer in values.index], y=values.tolist(), row=1, col=1, **about)
    others = parts[parts.layer.isna()]
    x_positions = _x_positions(others.site.tolist(), int(in_layers.layer.max()))
    figure.add_bar(
        x=x_positions, y=others.logit.tolist(), name="no layer", marker_color=_COLOURS["other"], row=1, col=1,
        text=others.site.tolist(), textposition="none", hovertemplate=f"%{{text}}: %{{y:+.3f}} logits{hover_end}",
    )  # fmt: skip
    if has_heads:
        figure.add_trace(_head_map(by_head, hover_end), row=2, col=1)
        figure.update_yaxes(title="head", showgrid=False, row=2, col=1)
    layers = sorted(int(layer) for layer in in_layers.layer.unique())
    layer_ticks = layers[:: 1 if len(layers) <= 16 else 2]
    figure.update_layout(
        template=layout_template(), height=700 if has_heads else 380, margin=dict(t=84, b=60, l=60, r=20),
        title=dict(text=_finding(parts, logit_name), y=1, yref="container", yanchor="top", pad=dict(t=20)),
        barmode="group", legend=dict(y=1.01), dragmode=False,
    )  # fmt: skip
    ticks = [*zip(x_positions, others.site, strict=True), *((layer, str(layer)) for layer in layer_ticks)]
    figure.update_xaxes(tickmode="array", tickvals=[x for x, _ in ticks], ticktext=[name for _, name in ticks])
    figure.update_xaxes(title="layer", row=1 + has_heads, col=1)
    figure.update_yaxes(title="part of the logit (logits)", row=1, col=1)
    return figure


def _parts_of_logit(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Returns (DataFrame, name as escaped text): the parts of one token's logit, or of the first token's logit minus
    the second's. Raises: ValueError for an empty table, more than one row, or more than two tokens."""
    if table.empty:
        raise ValueError("the table is empty; cp.analysis.attribution(trace, request_id, position) fills it")
    if table.row.nunique() > 1:
        raise ValueError(f"a figure is of one row; the table has {table.row.nunique()}")
    tokens = table.drop_duplicates("token_id").token.map(lambda text: markup(visible(text))).tolist()
    if len(tokens) > 2:
        raise ValueError(f"a figure is of one token, or two to compare; the table has {len(tokens)}")
    if len(tokens) == 1:
        return table, f"the logit of {tokens[0]}"
    first, second = (group.reset_index(drop=True) for _, group in table.groupby("token_id", sort=False))
    return first.assign(logit=first.logit - second.logit), f"the logit of {tokens[0]} over {tokens[1]}"


def _x_positions(names: list[str], last_layer: int) -> list[int]:
    """Returns a list with the x position of each part without a layer: -2 for the embedding, the others after the last
    layer."""
    after_last_layer = iter(range(last_layer + 2, last_layer + 2 + 2 * len(names), 2))
    return [-2 if name == "embed" else next(after_last_layer) for name in names]


def _head_map(by_head: pd.DataFrame, hover_end: str) -> go.Heatmap:
    """Returns a plotly heat map of the heads' parts of the logit: heads upwards, layers across."""
    grid = by_head.pivot(index="head", columns="layer", values="logit").sort_index()
    return go.Heatmap(
        x=[int(layer) for layer in grid.columns], y=[f"head {head}" for head in grid.index],
        z=grid.to_numpy(dtype=float).tolist(), xgap=1, ygap=1, **zero_centred(by_head.logit, _PART_COLOURS),
        colorbar=dict(title=dict(text="part (logits)", side="right"), thickness=12, x=1.01, len=0.45, y=0.23),
        hovertemplate=f"%{{y}} of layer %{{x}}: %{{z:+.3f}} logits{hover_end}",
    )  # fmt: skip


def _finding(parts: pd.DataFrame, logit_name: str) -> str:
    """Returns the figure's title: the row, the logit, and its largest part."""
    row, top = parts.iloc[0], parts.loc[parts.logit.idxmax()]
    status = row.status.replace("_", "-")
    of_layer = "" if pd.isna(top.layer) else f" of layer {top.layer}"
    of_head = "" if pd.isna(top["head"]) else f" head {top['head']}"
    part_name = _PART_NAMES.get(top.site, f"the {top.site}")
    title = f"Request {row.request_id}, {status} row at position {row.position}: "
    title += f"{logit_name} is {parts.logit.sum():.2f};<br>"
    return f"{title}the largest part, {top.logit:+.2f}, is from {part_name}{of_head}{of_layer}"
