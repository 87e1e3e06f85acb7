"""Draws tables of the repository's analyses: forced states, perplexity, beliefs, and answers to the coin task whose
states or cache slots were changed."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import (
    GREY,
    STATUS_STYLES,
    Figure,
    curve,
    interval,
    layer_ticks,
    panels,
    require_lines,
    set_layout,
)
from cacheprobe.views.text import markup

_PATCHES = {"unpatched": GREY, "recovered": "#2f9e4f", "wrong": "#d9483b"}


def forcing_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with three bars for each hidden state: the KL divergence, in nats, from its emissions to
    the prediction, without a patch, with the state's recovered centroid, and with that of another state.

    table: lines with state, patch (unpatched, recovered, wrong) and kl.
    Raises: ValueError for an empty table.
    """
    require_lines(table, "there is nothing to draw; force some states")
    figure = Figure()
    for patch, color in _PATCHES.items():
        own = table[table.patch == patch].sort_values("state")
        figure.add_bar(
            x=own.state.tolist(), y=own.kl.tolist(), name=patch, marker_color=color,
            hovertemplate=f"{patch}, hidden state %{{x}}: %{{y:.3f}} nats<extra></extra>",
        )  # fmt: skip
    means = table.groupby("patch").kl.mean()
    title = f"Forcing a state: {means['unpatched']:.3f} nats become {means['recovered']:.3f}, with another state's "
    set_layout(figure, f"{title}{means['wrong']:.3f}", 400)
    figure.update_xaxes(title="forced hidden state", dtick=1)
    figure.update_yaxes(title="KL divergence from its emissions (nats)")
    return figure


_LENSES = {"logit": {"color": GREY, "dash": "dash"}, "tuned": {"color": "#7c5fbd"}}


def perplexity_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with a line for each lens: the perplexity, on a logarithmic axis, that its readings give
    to the text's own next tokens, by layer.

    table: lines with lens (logit, tuned), layer and perplexity.
    Raises: ValueError for an empty table.
    """
    require_lines(table, "there is nothing to draw; read some layers")
    figure, said = Figure(), []
    for lens, style in _LENSES.items():
        own = table[table.lens == lens].sort_values("layer")
        said.append(f"{int((own.perplexity.diff() > 0).sum())} ({lens} lens)")
        hover = f"{lens} lens, layer %{{x}}: perplexity %{{y:,.1f}}"
        curve(figure, own, "perplexity", f"{lens} lens", hover, style)
    set_layout(figure, f"Layers at which perplexity rises: {', '.join(said)}", 400)
    figure.update_xaxes(title="layer", **layer_ticks(table.layer))
    figure.update_yaxes(title="perplexity", type="log")
    return figure


def simplex_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with a triangle of points for each panel, such as exact, trained and untrained.

    table: lines with panel, the exact belief a, b, c, which is the point's colour (red, green, blue), and the belief
    x, y, z at which it is drawn. A corner is certainty of one state.
    Raises: ValueError for an empty table.
    """
    require_lines(table, "there is nothing to draw; give some beliefs")
    names = list(dict.fromkeys(table.panel))
    figure = panels(names)
    for column, panel in enumerate(names, start=1):
        own = table[table.panel == panel]
        colors = [
            f"rgb({255 * a:.0f},{255 * b:.0f},{255 * c:.0f})" for a, b, c in zip(own.a, own.b, own.c, strict=True)
        ]
        figure.add_scattergl(
            x=(own.y + own.z / 2).to_numpy("float32"), y=(own.z * 3**0.5 / 2).to_numpy("float32"), mode="markers",
            showlegend=False, marker=dict(size=3, color=colors), row=1, col=column,
            customdata=own[["a", "b", "c", "x", "y", "z"]].to_numpy("float32"),  # half the bytes of a stored figure
            hovertemplate=f"{panel}: belief "
            + ", ".join(f"%{{customdata[{i}]:.2f}}" for i in range(3)) + "<br>at position "
            + ", ".join(f"%{{customdata[{i}]:.2f}}" for i in range(3, 6)) + "<extra></extra>",
        )  # fmt: skip
        figure.update_yaxes(scaleanchor=f"x{column if column > 1 else ''}", row=1, col=column)
    apart = (((table[["a", "b", "c"]].to_numpy() - table[["x", "y", "z"]].to_numpy()) ** 2).sum(1)) ** 0.5
    said = [f"{apart[(table.panel == panel).to_numpy()].mean():.3f} ({panel})" for panel in names]
    title = f"Mean distance of a point from the exact belief: {', '.join(said)}"
    set_layout(figure, title, 400, top=90, bottom=24, left=24)
    figure.update_xaxes(range=[-0.1, 1.1], showticklabels=False)
    figure.update_yaxes(range=[-0.1, 1.0], showticklabels=False)
    return figure


_PARTS = {"sink": STATUS_STYLES["committed"]["color"], "own": STATUS_STYLES["rolled_back"]["color"]}
_HEADS = {"as EAGLE-3": "solid", "norm_output": "dot"}


def drift_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure of three panels by chain step, with a line style for each draft head: the share of
    attention on the sink (the head's first row) and on the chain's own rows; the norm of the un-normed state; and the
    AUROC of accepted drafts, by margin and entropy alone and with these measures of drift added.

    table: lines with head (as EAGLE-3, norm_output), chain_step, sink, own, norm, known and both.
    Raises: ValueError for an empty table.
    """
    require_lines(table, "there is nothing to draw; give some chain steps")
    panel_of = {"sink": 1, "own": 1, "norm": 2, "known": 3, "both": 3}
    colors = {**_PARTS, "norm": "#7c5fbd", "known": GREY, "both": "#2b6cb0"}
    names = {"sink": "sink", "own": "own rows", "known": "margin, entropy", "both": "with drift"}
    figure = panels(["share of attention", "norm (dotted: norm_output)", "AUROC of accepted drafts"])
    for head, dash in _HEADS.items():
        own = table[table["head"] == head].sort_values("chain_step")
        for column, panel in panel_of.items() if len(own) else ():
            name = f"{names.get(column, column)}, {head}"
            style = {"color": colors[column], "dash": dash}
            hover = f"{name}, chain step %{{x}}: %{{y:.3f}}"
            curve(figure, own, column, name, hover, style, "chain_step", row=1, col=panel, showlegend=dash == "solid")
    steps = table[table["head"] == "as EAGLE-3"].sort_values("chain_step")
    first, last = steps.iloc[0], steps.iloc[-1]
    title = f"From chain step {first.chain_step} to {last.chain_step}: sink {first.sink:.2f} to {last.sink:.2f}, own "
    title += f"rows {first.own:.2f} to {last.own:.2f}, norm times {last.norm / first.norm:.2f}"
    set_layout(figure, title, 440, top=72, bottom=110, legend_y=-0.22, legend_yanchor="top")
    figure.update_xaxes(title="chain step", dtick=1)
    return figure


_TREATMENTS = {
    "other coin": {"color": STATUS_STYLES["committed"]["color"]},
    "own again": {"color": "#2b6cb0", "dash": "dot"},
    "other names": {"color": GREY, "dash": "dash"},
    "noise": {"color": STATUS_STYLES["rolled_back"]["color"], "dash": "dashdot"},
}


def carried_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with one panel for each place in the prompt: by layer, the mean normalised logit
    difference after the state at this place was replaced. 0 is the model's unchanged answer, 1 the model's answer to
    the question with the other coin. Each treatment has a line: the state of the question with the other coin, with
    other names, the own state again, or the own state with noise.

    table: from `cacheprobe_analyses.coin.coin_state_patch`: place, layer, treatment, n, nld, flips.
    Raises: ValueError for an empty table.
    """
    require_lines(table, "the table of patches is empty; there is nothing to draw")
    places = list(dict.fromkeys(table.place))
    columns = min(len(places), 5)
    rows = -(-len(places) // columns)
    figure = panels([markup(place) for place in places], lines=rows, shared_xaxes=True, shared_yaxes=True)
    for number, place in enumerate(places):
        panel = dict(showlegend=not number, row=1 + number // columns, col=1 + number % columns)
        for name, style in _TREATMENTS.items():
            lines = table[(table.place == place) & (table.treatment == name)].sort_values("layer")
            if lines.empty:
                continue
            counts = [[int(line.flips), int(line.n)] for line in lines.itertuples()]
            hover = f"{markup(place)}, layer %{{x}}, {name}: %{{y:.3f}}<br>%{{customdata[0]}} of "
            hover += "%{customdata[1]} answers flip"
            curve(figure, lines, "nld", name, hover, style, legendgroup=name, customdata=counts, **panel)
    swapped = table[table.treatment == next(iter(_TREATMENTS))]
    best = (swapped if len(swapped) else table).sort_values("nld").iloc[-1]
    claim = (
        "One state carries most of the answer" if best.nld > 0.5 else "No state carries half of the answer; the most is"
    )
    title = f"{claim} at {markup(best.place)}, layer {best.layer}: {best.nld:.2f}"
    set_layout(figure, title, 180 + 220 * rows, top=110, legend_y=1.09)  # the legend is above the panels' names
    figure.update_xaxes(**layer_ticks(table.layer, 4))
    figure.update_xaxes(title="layer", row=rows)
    figure.update_yaxes(title="normalised logit difference<br>(0 as it was, 1 the other's)", col=1)
    return figure


def ways_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly bar figure: the share of right answers for each change of the model (column `way`), with 95 %
    intervals and a line at chance.

    table: from `cacheprobe_analyses.thinking.state_or_attention`: way, share, low, high, right, examples, chance.
    Raises: ValueError for an empty table.
    """
    require_lines(table, "the table of ways is empty; there is nothing to draw")
    figure = Figure()
    figure.add_bar(
        x=[markup(way) for way in table.way], y=table.share.tolist(),
        **interval(table, "share", ".3f", right="right", examples="examples"),
        marker=dict(color=STATUS_STYLES["committed"]["color"]), showlegend=False,
        hovertemplate="%{x}: %{customdata}<extra></extra>",
    )  # fmt: skip
    chance = float(table.chance.iloc[0])
    figure.add_hline(
        y=chance, line=dict(color=GREY, dash="dot"), annotation_text="chance", annotation_position="top left"
    )
    at_chance = table[table.low <= chance]
    names = ", ".join(markup(way) for way in at_chance.way) or "no way here"
    set_layout(figure, f"No more than chance is left with: {names}", 400, top=72, bottom=96)
    figure.update_yaxes(title="answers right", range=[0, 1.03])
    return figure


_SLOT_TREATMENTS = {  # colour, texture
    "swapped": (STATUS_STYLES["committed"]["color"], ""),
    "masked": (STATUS_STYLES["superseded"]["color"], "/"),
    "other names": (GREY, "x"),
    "noise": (STATUS_STYLES["rolled_back"]["color"], "."),
    "own again": ("#2b6cb0", "-"),
}


def coin_rows_figure(effects: pd.DataFrame, *, unit: str = "span", people: int | None = None) -> go.Figure:
    """Returns a plotly bar figure of the mean normalised logit difference, for each changed part of the cache and each
    treatment: swapped with the other question, masked, noise, and two controls. 0 is the model's unchanged answer, 1
    the model's answer with the other coin.

    effects: from `cacheprobe_analyses.coin.coin_rows`: people, unit, where, treatment, n, total, flips.
    unit: "span" (several cache slots) or "row" (one cache slot).
    people: only questions about this many people; None for all.
    Raises: ValueError if no line has this unit and number of people.
    """
    chosen = effects[effects.unit == unit]
    if people is not None:
        chosen = chosen[chosen.people == people]
    if chosen.empty:
        raise ValueError(
            f"no effects of unit {unit!r} and {people} people; the table has {', '.join(effects.unit.unique())} and "
            f"{', '.join(map(str, sorted(effects.people.unique())))} people"
        )
    summed = chosen.groupby(["where", "treatment"], sort=False)[["n", "total", "flips"]].sum().reset_index()
    summed["nld"] = summed.total / summed.n
    figure = Figure()
    for name, (colour, texture) in _SLOT_TREATMENTS.items():
        lines = summed[summed.treatment == name]
        figure.add_bar(
            x=[markup(where) for where in lines["where"]], y=lines.nld.tolist(), name=name,
            marker=dict(color=colour, pattern=dict(shape=texture)),
            customdata=[[int(row.flips), int(row.n)] for row in lines.itertuples()],
            hovertemplate=f"%{{x}}, {name}: %{{y:.3f}}<br>%{{customdata[0]}} of %{{customdata[1]}} flip<extra></extra>",
        )  # fmt: skip
    swapped = summed[(summed.treatment == "swapped") & (summed["where"] != "all rows")]
    best = swapped.loc[swapped.nld.idxmax()]
    noun = "slot" if unit == "row" else unit
    title = f"The {noun} whose swap brings over most: {markup(best['where'])}, {best.nld:.2f}"
    set_layout(figure, title, 380, top=72, bottom=72, barmode="group", dragmode=False)
    figure.update_yaxes(title="normalised logit difference<br>(0 as it was, 1 as the other question)")
    return figure
