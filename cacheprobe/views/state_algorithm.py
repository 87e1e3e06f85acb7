"""Draws how a model computes a state: which labels probes read by layer, and how long a patched prefix must be."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.views.intervals import error_bars, interval_texts
from cacheprobe.views.style import STATUS_STYLES, Figure, layout_template

_LABELS = {
    "parity": (STATUS_STYLES["superseded"], "parity"),
    "halves": (STATUS_STYLES["rolled_back"], "other halves of the states"),
    "state": (STATUS_STYLES["committed"], "state"),
}
_KINDS = {"same": "of the same parity", "other": "of the other parity"}


def state_algorithm_figure(probes: pd.DataFrame, patches: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure. One panel has the accuracy of probes for state and parity by layer. Heat maps have the
    mean normalised logit difference (NLD) by layer and last patched position, for pairs of texts whose first actions
    have the same or the other parity.

    probes: label, layer, place, accuracy, low, high, majority, of one model; only lines of the largest place are drawn.
    Lines of the label "halves", if any, are means, with the worst and the best of several probes.
    patches: kind ("same" or "other": the parity of the action in which two texts differ), layer, position, nld; may be
    empty.
    Raises: ValueError for an empty table of probes.
    """
    if probes.empty:
        raise ValueError("the table of probes is empty; give the lines of one model")
    last_place = probes[probes.place == probes.place.max()]
    kinds = [kind for kind in _KINDS if len(patches) and (patches.kind == kind).any()]
    titles = [
        f"probes after {last_place.place.iloc[0]} operations",
        *(f"first actions {_KINDS[kind]}" for kind in kinds),
    ]
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles, figure=Figure())
    for label, (style, name) in _LABELS.items():
        lines = last_place[last_place.label == label].sort_values("layer")
        if lines.empty:
            continue
        figure.add_scatter(
            x=lines.layer.tolist(), y=lines.accuracy.tolist(), name=name, mode="lines+markers", row=1, col=1,
            line=dict(color=style["color"], dash=style["dash"], width=2), marker=dict(symbol=style["symbol"], size=7),
            error_y=error_bars(lines, "accuracy"),
            customdata=interval_texts(lines, "accuracy", ".3f", examples="examples", groups="groups"),
            hovertemplate=f"{name}, layer %{{x}}: %{{customdata}}<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=lines.layer.tolist(), y=lines.majority.tolist(), name=f"commonest {name}", mode="lines", row=1, col=1,
            line=dict(color="#7b858f", dash=style["dash"], width=1.5), hoverinfo="skip",
        )  # fmt: skip
    for column, kind in enumerate(kinds, start=2):
        effects = patches[patches.kind == kind].pivot(index="layer", columns="position", values="nld")
        figure.add_heatmap(
            x=effects.columns.tolist(), y=effects.index.tolist(), z=effects.to_numpy(), zmin=0, zmax=1, xgap=1, ygap=1,
            showscale=column == 2, row=1, col=column,
            hovertemplate="layer %{y}, clean up to position %{x}: %{z:.3f}<extra></extra>",
            colorbar=dict(title=dict(text="mean NLD (0 corrupted, 1 clean)", side="right"), thickness=12, x=1.01),
        )  # fmt: skip
        figure.update_xaxes(title="clean up to position (tokens)", showgrid=False, row=1, col=column)
        figure.update_yaxes(title="layer" if column == 2 else None, dtick=1, showgrid=False, row=1, col=column)
    figure.update_layout(
        template=layout_template(), title=_finding(last_place), height=380, margin=dict(l=48, r=12, t=110, b=48)
    )
    figure.update_xaxes(title="layer", dtick=1, row=1, col=1)
    figure.update_yaxes(title="held-out accuracy", range=[0, 1.04], row=1, col=1)
    return figure


def _finding(probes: pd.DataFrame) -> str:
    """Returns the figure's title: for parity and state, the first layer at which a probe has an accuracy of 95 % or
    more, or else the highest accuracy."""
    best = probes.groupby("label").accuracy.max()
    first_layer = {label: lines[lines.accuracy >= 0.95].layer.min() for label, lines in probes.groupby("label")}
    claims = [
        f"{label} at layer {first_layer[label]}"
        if pd.notna(first_layer[label])
        else f"{label} never (at most {best[label]:.2f})"
        for label in ("parity", "state")
    ]
    return f"Read with 95 % accuracy: {', '.join(claims)}"
