"""Draws how far a coin-flip answer moves if states or cache slots are changed, and shares of right answers."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.views.style import STATUS_STYLES, Figure, interval, set_layout
from cacheprobe.views.text import markup

_GREY = "#7b858f"
_TREATMENTS = {  # colour, dash
    "other coin": (STATUS_STYLES["committed"]["color"], "solid"),
    "own again": ("#2b6cb0", "dot"),
    "other names": (_GREY, "dash"),
    "noise": (STATUS_STYLES["rolled_back"]["color"], "dashdot"),
}


def carried_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with one panel for each place in the prompt: by layer, the mean normalised logit
    difference after the state at this place was replaced. 0 is the model's unchanged answer, 1 the model's answer to
    the question with the other coin. Each treatment has a line: the state of the question with the other coin, with
    other names, the own state again, or the own state with noise.

    table: from `cacheprobe_analyses.coin.coin_state_patch`: place, layer, treatment, n, nld, flips.
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("the table of patches is empty; there is nothing to draw")
    places = list(dict.fromkeys(table.place))
    columns = min(len(places), 5)
    rows = -(-len(places) // columns)
    titles = [markup(place) for place in places]
    figure = make_subplots(
        rows=rows, cols=columns, shared_xaxes=True, shared_yaxes=True, subplot_titles=titles, figure=Figure()
    )
    for number, place in enumerate(places):
        for name, (color, dash) in _TREATMENTS.items():
            lines = table[(table.place == place) & (table.treatment == name)].sort_values("layer")
            if lines.empty:
                continue
            figure.add_scatter(
                x=lines.layer.tolist(), y=lines.nld.tolist(), name=name, legendgroup=name, showlegend=not number,
                mode="lines+markers", line=dict(color=color, dash=dash, width=2), marker=dict(size=5),
                customdata=[[int(line.flips), int(line.n)] for line in lines.itertuples()],
                hovertemplate=f"{markup(place)}, layer %{{x}}, {name}: %{{y:.3f}}<br>%{{customdata[0]}} of "
                "%{customdata[1]} answers flip<extra></extra>",
                row=1 + number // columns, col=1 + number % columns,
            )  # fmt: skip
    swapped = table[table.treatment == next(iter(_TREATMENTS))]
    best = (swapped if len(swapped) else table).sort_values("nld").iloc[-1]
    claim = (
        "One state carries most of the answer" if best.nld > 0.5 else "No state carries half of the answer; the most is"
    )
    title = f"{claim} at {markup(best.place)}, layer {best.layer}: {best.nld:.2f}"
    set_layout(figure, title, 180 + 220 * rows, top=110, legend_y=1.09)  # the legend is above the panels' names
    figure.update_xaxes(title="layer", row=rows)
    figure.update_yaxes(title="0 as it was, 1 the other's", col=1)
    return figure


def ways_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly bar figure: the share of right answers for each change of the model (column `way`), with 95 %
    intervals and a line at chance.

    table: from `cacheprobe_analyses.thinking.state_or_attention`: way, share, low, high, right, examples, chance.
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("the table of ways is empty; there is nothing to draw")
    figure = Figure()
    figure.add_bar(
        x=[markup(way) for way in table.way], y=table.share.tolist(),
        **interval(table, "share", ".3f", right="right", examples="examples"),
        marker=dict(color=STATUS_STYLES["committed"]["color"]), showlegend=False,
        hovertemplate="%{x}: %{customdata}<extra></extra>",
    )  # fmt: skip
    chance = float(table.chance.iloc[0])
    figure.add_hline(y=chance, line=dict(color=_GREY, dash="dot"), annotation_text="chance")
    at_chance = table[table.low <= chance]
    names = ", ".join(markup(way) for way in at_chance.way) or "no way here"
    set_layout(figure, f"No more than chance is left with: {names}", 400, top=72, bottom=96)
    figure.update_yaxes(title="answers right", range=[0, 1.03])
    return figure


_SLOT_TREATMENTS = {  # colour, texture
    "swapped": (STATUS_STYLES["committed"]["color"], ""),
    "masked": (STATUS_STYLES["superseded"]["color"], "/"),
    "other names": (_GREY, "x"),
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
    figure.update_yaxes(title="0 as it was, 1 as the other question")
    return figure
