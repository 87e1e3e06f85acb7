"""Draws the perplexity of a text by layer, as each lens reads it."""

import pandas as pd
import plotly.graph_objects as go

from cacheprobe.views.style import Figure, layer_ticks, layout_template

_LENSES = {"logit": ("#7b858f", "dash"), "tuned": ("#7c5fbd", "solid")}


def perplexity_figure(table: pd.DataFrame) -> go.Figure:
    """Returns a plotly figure with a line for each lens: the perplexity, on a logarithmic axis, that its readings give
    to the text's own next tokens, by layer.

    table: lines with lens (logit, tuned), layer and perplexity.
    Raises: ValueError for an empty table.
    """
    if table.empty:
        raise ValueError("there is nothing to draw; read some layers")
    figure, said = Figure(), []
    for lens, (color, dash) in _LENSES.items():
        own = table[table.lens == lens].sort_values("layer")
        said.append(f"{int((own.perplexity.diff() > 0).sum())} ({lens} lens)")
        figure.add_scatter(
            x=own.layer.tolist(), y=own.perplexity.tolist(), name=f"{lens} lens", mode="lines+markers",
            line=dict(color=color, dash=dash, width=2),
            hovertemplate=f"{lens} lens, layer %{{x}}: perplexity %{{y:,.1f}}<extra></extra>",
        )  # fmt: skip
    figure.update_layout(
        template=layout_template(), title=f"Layers at which perplexity rises: {', '.join(said)}", height=400
    )
    figure.update_xaxes(title="layer", **layer_ticks(table.layer))
    figure.update_yaxes(title="perplexity", type="log")
    return figure
