"""Draws the lens readings of one request in two runs, and their difference, as three heat maps under one cursor."""

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from cacheprobe.views.lens_table import FLOOR_NATS, reads_and_predicts
from cacheprobe.views.style import Figure, layout_template
from cacheprobe.views.text import markup, token_label, visible

_MOST = 60
"""Largest number of positions that are drawn."""
_LABEL, _MOST_TICKS = 10, 30
_COLOURS = [(0, "#c2702b"), (0.5, "rgba(128,128,128,.12)"), (1, "#2b8cbe")]
"""Readable on light and dark paper."""
_READ = ["token", "logprob_nats", "committed_token", "committed_logprob_nats"]
_NATS = ["committed_logprob_nats", "committed_logprob_nats_theirs"]


class NothingToCompare(ValueError):
    """Raised if two runs have no lens reading of the same place."""


def lens_difference(ours: pd.DataFrame, theirs: pd.DataFrame, names: tuple[str, str] = ("ours", "theirs")) -> go.Figure:
    """Returns a plotly figure of three heat maps with one cursor: by layer and position, the log-probability in nats of
    the token that was committed next, in ours and in theirs, and ours minus theirs. Hover texts have both runs' first
    choices.

    Only positions before the first committed token that differs are drawn, at most the last 60 of these: after it the
    runs read other texts. A place whose next tokens differ is blank in the difference, which is left out if it is
    zero or blank everywhere.
    ours, theirs: readings of one request and site, as in `Trace.hypotheses`; only committed rows are used.
    Raises: NothingToCompare if no place was read in both runs before the first token that differs.
    """
    keys = ["position", "layer"]
    pair = [table[table.status == "committed"][[*keys, *_READ, "committed_token_id"]] for table in (ours, theirs)]
    both = pair[0].merge(pair[1], on=keys, suffixes=("", "_theirs")).sort_values(keys)
    is_other = (both.committed_token_id != both.committed_token_id_theirs).fillna(False)
    if is_other.any():
        both = both[both.position <= both.position[is_other].min()]
    if both.empty:
        raise NothingToCompare("the runs read no place in common before the first token that differs")
    both = both[both.position.isin(sorted(both.position.unique())[-_MOST:])]
    is_same = (both.committed_token_id == both.committed_token_id_theirs).fillna(False)
    difference = (both[_NATS[0]] - both[_NATS[1]]).where(is_same)
    return _figure(both.assign(difference=difference, hover=_hovers(both, names)), names)


def _figure(both: pd.DataFrame, names: tuple[str, str]) -> go.Figure:
    has_difference = bool(both.difference.fillna(0).any())
    positions, values = sorted(both.position.unique()), [*_NATS, *["difference"] * has_difference]
    titles = [*map(markup, names), f"{markup(names[0])} minus {markup(names[1])}"]
    figure = make_subplots(
        rows=len(values),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        subplot_titles=titles[: len(values)],
        figure=Figure(),
    )
    hover = both.pivot(index="layer", columns="position", values="hover").to_numpy()
    for row, column in enumerate(values, start=1):
        grid = both.pivot(index="layer", columns="position", values=column)
        figure.add_heatmap(
            x=list(range(len(positions))), y=grid.index.tolist(), z=grid.to_numpy(dtype=float, na_value=float("nan")),
            text=hover, hovertemplate="%{text}<extra></extra>", xgap=1, ygap=1, row=row, col=1,
            coloraxis="coloraxis2" if row == 3 else "coloraxis",
        )  # fmt: skip
        figure.update_yaxes(title="layer", row=row, col=1)
    next_tokens = both.drop_duplicates("position").set_index("position").committed_token
    ticks = list(range(0, len(positions), -(-len(positions) // _MOST_TICKS)))
    labels = [f"{positions[i] + 1} {token_label(str(next_tokens[positions[i]]), _LABEL)}" for i in ticks]
    figure.update_xaxes(
        tickvals=ticks, ticktext=[markup(label) for label in labels], tickangle=-60,
        showspikes=True, spikemode="across", spikethickness=1, spikedash="dot", spikesnap="data",
    )  # fmt: skip
    figure.update_xaxes(title="position and text of the committed token", row=len(values), col=1)
    largest = float(both.difference.abs().fillna(0).max())
    apart = f"at most {largest:.2g} nats apart" if largest else "the same in both"
    if both.difference.isna().all():
        apart = "the runs go on with other tokens"
    figure.update_layout(
        title=f"Log-probability of the next committed token: {apart}",
        template=layout_template(), hovermode="closest", height=260 + len(values) * max(8 * both.layer.nunique(), 110),
        coloraxis=dict(cmin=max(both[_NATS].min().min(), FLOOR_NATS), cmax=0.0, colorbar=_bar("nats", 0.69, 0.6)),
    )  # fmt: skip
    if has_difference:
        bar = _bar("difference, nats", 0.13, 0.3)
        figure.update_layout(
            coloraxis2=dict(cmin=-(largest or 1), cmax=largest or 1, colorscale=_COLOURS, colorbar=bar)
        )
    return figure


def _bar(title: str, y: float, length: float) -> dict[str, object]:
    return dict(title=dict(text=title, side="right", font=dict(size=12)), thickness=12, len=length, y=y, x=1.01)


def _hovers(both: pd.DataFrame, names: tuple[str, str]) -> list[str]:
    """Returns a text for each place: the first choice of both runs, and how likely the next token is in each."""
    texts = [f"{reads_and_predicts(at)}, layer {layer}" for at, layer in zip(both.position, both.layer, strict=True)]
    for name, end in zip(names, ("", "_theirs"), strict=True):
        columns = [both[f"{column}{end}"] for column in _READ]
        texts = [
            f"{text}<br>{markup(name)}: {_said(token, nats)}; next {_said(then, next_nats)}"
            for text, token, nats, then, next_nats in zip(texts, *columns, strict=True)
        ]
    return texts


def _said(token: object, nats: object) -> str:
    return "not known" if pd.isna(token) else f"{markup(visible(str(token)))} {nats:.2f} nats"
