"""Draws what hidden states tell by layer, with baselines and 95 % intervals: probes, rollback predictions, final
choices, rejected tokens, and how a state is computed."""

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.core.hook_names import site_label
from cacheprobe.views.style import (
    STATUS_STYLES,
    Figure,
    baseline,
    curve,
    interval,
    layer_ticks,
    mark_layer,
    panels,
    require_lines,
    set_layout,
    zero_centred,
)
from cacheprobe.views.text import markup, shorten

_SITES = {
    "S": {"color": "#7c5fbd", "symbol": "circle"},
    "T": {"color": "#2b8cbe", "symbol": "diamond"},
    "C": {"color": "#c2702b", "symbol": "square"},
}
_REJECTED = {"color": "#d9483b", "symbol": "x"}
_PANEL_COLUMNS = 22
"""Largest width of the name above a panel, in columns of a monospaced font."""
_BASELINES = {"untrained": "dash", "embedding": "dot", "majority": "solid"}
_CONTROLS = {"position": ("position alone", "dash"), "margin": ("margin alone", "dot"),
             "shuffled": ("labels shuffled", "solid")}  # fmt: skip


def probe_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure of the probes' accuracy on held-out examples by layer: a panel for each place in the
    text, a line for each site (S, T, C), and 95 % intervals. Grey lines are baselines, such as the most common class.

    table: from `cp.probes.ProbeResult`. The baselines are the untrained model (of the first site), the word
    embeddings, and the most common class.
    Raises: ValueError for an empty table.
    """
    require_lines(table, "the table of probes is empty; fit some")
    places = list(dict.fromkeys(zip(table["at"], table.place, strict=True)))
    figure = panels([_place_name(*place, most=_PANEL_COLUMNS) for place in places], shared_yaxes=True)
    for column, (at, place) in enumerate(places, start=1):
        of_place = table[(table["at"] == at) & (table.place == place)].sort_values("layer", kind="stable")
        panel, where = dict(row=1, col=column, showlegend=column == 1), _place_name(at, place)
        for site in [site for site in _SITES if (of_place.site == site).any()]:
            lines = of_place[of_place.site == site]
            shown = interval(lines, "accuracy", ".3f", examples="examples", groups="groups")
            hover = f"{site}, layer %{{x}}, {where}: %{{customdata}}"
            curve(figure, lines, "accuracy", site_label(site), hover, _SITES[site], legendgroup=site, **panel, **shown)
        first_site = table[(table["at"] == at) & (table.place == place)].site.iloc[0]
        first = of_place[of_place.site == first_site]
        for name, dash in _BASELINES.items():
            if first[name].notna().all():
                hover = f"{name}, layer %{{x}}, {where}: %{{y:.3f}}"
                baseline(figure, first, name, name, hover, dash, legendgroup=name, **panel)
    above = table[table.is_above].groupby(["at", "place"]).ngroups
    title = f"At {above} of {len(places)} places some layer tells the state better than any baseline"
    set_layout(figure, title, 420, top=110, legend_y=1.09)  # the legend is above the panels' names
    figure.update_xaxes(title="layer", **layer_ticks(table.layer, 4))
    figure.update_yaxes(range=[0.2, 1.03])
    figure.update_yaxes(title="held-out accuracy", col=1)
    return figure


def _place_name(at: str, place: object, most: int = 200) -> str:
    """Returns the name of a probed place as escaped text, such as "operation 3" or "prompt's last token"."""
    if at == "event":
        return f"operation {place}"
    return "prompt's last token" if place == -1 else markup(shorten(f"{at} {place}", most))


def _by_drafter(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, dict[str, object]]]:
    """Yields (name of a drafter, its lines by layer, plotly's settings of the curves in its panel); the first panel's
    curves are in the legend."""
    for i, drafter in enumerate(dict.fromkeys(table.drafter), start=1):
        lines = table[table.drafter == drafter].sort_values("layer")
        yield drafter, lines, dict(row=1, col=i, showlegend=i == 1)


def rollback_prediction_figure(table: pd.DataFrame, unit: str = "draft") -> go.Figure:
    """Returns a plotly figure of the AUROC by layer with which probes of hidden states predict a rollback: one panel
    for each drafter. Grey lines are controls: position alone, the top-two margin of the logits alone, and shuffled
    labels.

    table: from `cp.probes.RollbackPrediction`, of one or more drafters.  unit: lines to draw: "draft" (whole
    drafts) or "candidate" (each draft token up to the first mismatch).
    Raises: ValueError if the table has no line of this unit.
    """
    rows = table[table.unit == unit] if len(table) else table
    require_lines(rows, f"there is no line of unit {unit!r} to draw: too few rollbacks, or another unit was asked for")
    rows = rows.assign(drafter=rows.drafter.map(markup))
    figure = panels(rows.drafter.unique().tolist(), shared_yaxes=True)
    for drafter, lines, panel in _by_drafter(rows):
        hover = f"states before {drafter}'s {unit}, layer %{{x}}: %{{customdata}}"
        curve(figure, lines, "auroc", "states", hover, _REJECTED, **panel, **interval(lines, "auroc", ".3f"))
        for column, (name, dash) in _CONTROLS.items():
            baseline(figure, lines, column, name, f"{name}, {drafter}, layer %{{x}}: %{{y:.3f}}", dash, **panel)
    last = rows.sort_values("layer").groupby("drafter", sort=False).tail(1)
    drafter_names = ", ".join(last.drafter[last.gain_low > 0]) or "no drafter here"
    title = f"States foretell a rollback better than position or margin for {drafter_names}"
    set_layout(figure, title, 420, top=110, legend_y=1.1)  # the legend is above the panels' names
    figure.update_xaxes(title="layer", **layer_ticks(rows.layer, 6))
    figure.update_yaxes(range=[0.35, 1.02])
    figure.update_yaxes(title=f"AUROC, by {unit}", col=1)
    return figure


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
    require_lines(probes, "the table of probes is empty; give the lines of one model")
    last_place = probes[probes.place == probes.place.max()]
    kinds = [kind for kind in _KINDS if len(patches) and (patches.kind == kind).any()]
    titles = [f"first actions {_KINDS[kind]}" for kind in kinds]
    figure = panels([f"probes after {last_place.place.iloc[0]} operations", *titles])
    for label, (style, name) in _LABELS.items():
        lines = last_place[last_place.label == label].sort_values("layer")
        if lines.empty:
            continue
        shown = interval(lines, "accuracy", ".3f", examples="examples", groups="groups")
        curve(figure, lines, "accuracy", name, f"{name}, layer %{{x}}: %{{customdata}}", style, row=1, col=1, **shown)
        baseline(
            figure, lines, "majority", f"commonest {name}", "", style["dash"], hoverinfo="skip", row=1, col=1
        )  # fmt: skip
    scale = zero_centred([*patches.nld, 1.0] if kinds else [])
    for column, kind in enumerate(kinds, start=2):
        effects = patches[patches.kind == kind].pivot(index="layer", columns="position", values="nld")
        figure.add_heatmap(
            x=effects.columns.tolist(), y=effects.index.tolist(), z=effects.to_numpy(), xgap=1, ygap=1, **scale,
            showscale=column == 2, row=1, col=column,
            hovertemplate="layer %{y}, clean up to position %{x}: %{z:.3f}<extra></extra>",
            colorbar=dict(title=dict(text="mean NLD (0 corrupted, 1 clean)", side="right", font_size=12), x=1.01),
        )  # fmt: skip
        figure.update_xaxes(title="clean up to position (tokens)", showgrid=False, row=1, col=column)
        figure.update_yaxes(title="layer" if column == 2 else None, dtick=1, showgrid=False, row=1, col=column)
    below = dict(orientation="h", x=0, y=-0.25, yanchor="top")
    set_layout(figure, _first_layers(last_place), 470, top=72, bottom=140, legend=below)
    figure.update_xaxes(title="layer", dtick=1, row=1, col=1)
    figure.update_yaxes(title="held-out accuracy", range=[0, 1.04], row=1, col=1)
    return figure


def _first_layers(probes: pd.DataFrame) -> str:
    """Returns the figure's title: for parity and state, the first layer at which a probe has an accuracy of 95 % or
    more, or else the highest accuracy."""
    claims = []
    for label in ("parity", "state"):
        lines = probes[probes.label == label]
        first_layer = lines[lines.accuracy >= 0.95].layer.min()
        never = f"{label} never (at most {lines.accuracy.max():.2f})"
        claims.append(never if pd.isna(first_layer) else f"{label} at layer {first_layer}")
    return f"Read with 95 % accuracy: {', '.join(claims)}"


_COLORS = ("#7c5fbd", "#2b8cbe", "#c2702b", "#2f9e4f")


def final_choice_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with a line for each of the first four kinds of row (column `kind`): by layer, the share
    of rows whose most likely token is already that of their last layer. A dotted line shows chance: the share that
    equals another row's last choice.

    table: kind, layer, share, low, high (95 %), chance.
    Raises: ValueError for an empty table.
    """
    require_lines(table, "the table of final choices is empty; read some rows")
    table = table.assign(kind=table.kind.map(markup))
    figure, halfway, ends = Figure(), [], set[int]()
    for kind, color in zip(dict.fromkeys(table.kind), _COLORS, strict=False):
        lines = table[table.kind == kind].sort_values("layer")
        shares, hover = interval(lines, "share", ".1%", rows="rows"), f"{kind}, layer %{{x}}: %{{customdata}}"
        curve(figure, lines, "share", kind, hover, {"color": color}, **shares)
        hover, line = f"{kind}, another row's choice, layer %{{x}}: %{{y:.1%}}", dict(color=color, width=1, dash="dot")
        baseline(figure, lines, "chance", f"{kind}: another row's choice", hover, "dot", line=line)
        if lines.share.iloc[-1] == 1:  # each row's last choice is compared with itself
            ends.add(int(lines.layer.iloc[-1]))
        at_least_half = lines[lines.share >= 0.5]
        if len(at_least_half):
            halfway.append(f"{kind} from layer {at_least_half.layer.iloc[0]}")
    for layer in sorted(ends):
        mark_layer(figure, layer, "last layer: 100 % by construction", 1.0)
    title = (
        f"Half hold their final choice: {', '.join(halfway)}" if halfway else "No layer has half of the final choices"
    )
    set_layout(figure, title, 400, top=90)
    figure.update_xaxes(title="layer", **layer_ticks(table.layer))
    figure.update_yaxes(title="share of rows", tickformat=".0%", range=[-0.02, 1.04])
    return figure


def disagreement_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with one panel for each drafter: by layer, the share of rejected draft tokens that are
    more likely than the token committed in their place. A dotted line shows the same share for rejected tokens of other
    rows.

    table: drafter, layer, share, low, high (95 %), control (the dotted line).
    Raises: ValueError for an empty table.
    """
    require_lines(table, "no draft was rejected, so there is nothing to draw")
    table = table.assign(drafter=table.drafter.map(markup))
    figure, control = panels(table.drafter.unique().tolist(), shared_yaxes=True), "another row's rejected token"
    for drafter, lines, panel in _by_drafter(table):
        shares, hover = interval(lines, "share", ".1%", rejected="rejected drafts"), f"{drafter}, layer %{{x}}: "
        curve(figure, lines, "share", "the rejected token", f"{hover}%{{customdata}}", _REJECTED, **panel, **shares)
        hover = f"{drafter}, {control}, layer %{{x}}: %{{y:.1%}}"
        baseline(figure, lines, "control", control, hover, "dot", **panel)
    until = table[table.share > 0.5].groupby("drafter", sort=False).layer.max()
    by_first_layer = dict.fromkeys(table.sort_values("layer").drafter)
    held_until = [f"{drafter} until layer {int(until[drafter])}" for drafter in by_first_layer if drafter in until]
    title = "The committed token leads throughout"
    if held_until:
        title = f"Most hold the rejected token likelier: {', '.join(held_until)}"
    set_layout(figure, title, 420, top=110, legend_y=1.1)  # the legend is above the panels' names
    figure.update_xaxes(title="layer", **layer_ticks(table.layer))
    figure.update_yaxes(title="share of rejected drafts", tickformat=".0%", range=[-0.02, 1.04], col=1)
    return figure
