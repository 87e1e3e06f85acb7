"""Defines the colours, patterns and plotly settings that pictures share.

Blue prefill, yellow draft token or provisional slot, green accepted or verified, red rejected, hatched pending, grey
other requests. Textures, signs and labels beside the colours help readers without colour vision.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import SupportsInt

import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from cacheprobe.core.files import write_whole
from cacheprobe.views.images import image, kind_of

FIGURE_CONFIG = {"showSendToCloud": False, "displaylogo": False, "responsive": True}
"""plotly's settings of every figure, on a page or in a notebook; the button that uploads the data stays off."""

SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", "Liberation Sans", sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'

_LIGHT = {
    "ink": "#1b2027", "muted": "#59636e", "paper": "#ffffff", "card": "#f6f7f9", "line": "#d3d8de",
    "blue": "#cfe2f8", "blue-edge": "#2b6cb0", "yellow": "#fdebae", "yellow-edge": "#a87900",
    "green": "#ccecd2", "green-edge": "#23793a", "red": "#fad6d2", "red-edge": "#bd3127",
    "grey": "#e3e6ea", "grey-edge": "#7b858f", "blank": "#caced2", "violet": "#aa97d6",
}  # fmt: skip
_DARK = {
    "ink": "#e7ebf0", "muted": "#9ba6b2", "paper": "#0f1318", "card": "#171c22", "line": "#323a44",
    "blue": "#1c3d63", "blue-edge": "#74b0f0", "yellow": "#4b3c0c", "yellow-edge": "#e6bf45",
    "green": "#184728", "green-edge": "#66cc80", "red": "#55201d", "red-edge": "#f4877e",
    "grey": "#2d333b", "grey-edge": "#8d97a2", "blank": "#41484f", "violet": "#5d4b96",
}  # fmt: skip

STATUS_STYLES = {
    "committed": {"color": "#2f9e4f", "dash": "solid", "symbol": "circle"},
    "superseded": {"color": "#c58f00", "dash": "dash", "symbol": "diamond"},
    "rolled_back": {"color": "#d9483b", "dash": "dot", "symbol": "x"},
    "abandoned": {"color": "#7b858f", "dash": "dot", "symbol": "circle-open"},
}
"""Colour, line dash and marker of each row status in plotly figures, readable on white and on black."""

GREY = "#7b858f"
"""Colour of baselines and controls in plotly figures."""

_SCALES = {
    False: ["#f3f0f9", "#d5cbeb", "#aa97d6", "#7c5fbd", "#4a2c8f"],
    True: ["#1d1b28", "#38305a", "#5d4b96", "#8d76cc", "#c9b8ff"],
}


DIVERGING = ["#a87900", "#f0d58a", "#f7f7f7", "#aa97d6", "#4a2c8f"]
"""Colours from the most negative number to the most positive one; the middle is zero, and grey."""


def zero_centred(values: Iterable[float], colours: Sequence[str] = tuple(DIVERGING)) -> dict[str, object]:
    """Returns plotly's settings (zmin, zmax, colorscale) of a heat map in which zero has the middle one of `colours`,
    and numbers of one size are equally strong on both sides. The scale spans the values and zero, and no more."""
    known = [float(value) for value in values if value == value]
    low, high = min([0.0, *known]), max([0.0, *known])
    low, high = (low, high) if low < high else (0.0, 1.0)
    limit = max(-low, high)
    points = sorted({0.0, *(low + (high - low) * i / 32 for i in range(33))})
    shades = sample_colorscale(list(colours), [(point / limit + 1) / 2 for point in points])
    scale = [[(point - low) / (high - low), shade] for point, shade in zip(points, shades, strict=True)]
    return {"zmin": low, "zmax": high, "colorscale": scale}


def mark_layer(figure: go.Figure, layer: int, meaning: str, top: float, dash: str = "dot", **panel: int) -> None:
    """Adds a grey line across at a layer, with its meaning in the legend: what holds there by construction, so that it
    is not taken for a finding. top: where the line ends upwards; it begins at 0.  panel: row and col."""
    hover = f"layer {layer}: {meaning}<extra></extra>"
    line = dict(color=GREY, dash=dash, width=1.5)
    figure.add_scatter(
        x=[layer, layer], y=[0, top], mode="lines", name=meaning, line=line, hovertemplate=hover, **panel
    )  # fmt: skip


class Figure(go.Figure):
    """A plotly figure without plotly's button for uploading the data. `show`, `to_html` and `write_html` use
    FIGURE_CONFIG unless another `config` is given. `write_image` draws on white; `data` has the drawn numbers."""

    def show(self, *args: object, **settings: object) -> object:
        """Shows the figure as `go.Figure.show` does, with FIGURE_CONFIG (no upload button, no logo) as the defaults of
        the argument `config`."""
        return super().show(*args, **_configured(settings))

    def to_html(self, *args: object, **settings: object) -> str:
        """Returns the figure as HTML text, as `go.Figure.to_html` does, with FIGURE_CONFIG (no upload button, no logo)
        as the defaults of the argument `config`."""
        return super().to_html(*args, **_configured(settings))

    def write_html(self, *args: object, **settings: object) -> object:
        """Writes the figure to an HTML file, as `go.Figure.write_html` does, with FIGURE_CONFIG (no upload button, no
        logo) as the defaults of the argument `config`."""
        return super().write_html(*args, **_configured(settings))

    def write_image(self, file: "str | Path", format: str | None = None, width: int | None = None) -> Path:
        """Writes the figure to a PNG, SVG or PDF file on a white ground, with a long title wrapped, and returns the
        path. format: by default the ending of `file`.  width: pixels; by default the figure's own, or 900.

        Raises: ValueError for another format; ImageError if there is no browser to draw with.
        """
        content = image(self, kind_of(file, format), width=width)
        return write_whole(Path(file), lambda beside: beside.write_bytes(content))

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, validate: bool = True, **settings: object
    ) -> object:
        return super()._repr_mimebundle_(include, exclude, validate, **_configured(settings))

    def _ipython_display_(self) -> None:
        self.show()


def layer_ticks(layers: Iterable[SupportsInt], most: int = 8) -> dict[str, int]:
    """Returns plotly's settings (tick0, dtick) of an axis of layers as a dict: a tick at every layer, or at every
    second, fifth, tenth ..., so that at most `most` + 1 ticks are drawn."""
    numbers = sorted({int(layer) for layer in layers})
    span = numbers[-1] - numbers[0]
    return {"tick0": numbers[0], "dtick": next(step for step in (1, 2, 5, 10, 20, 50, 10**6) if span <= step * most)}


def panels(titles: Sequence[str], *, lines: int = 1, **settings: object) -> Figure:
    """Returns a figure with a panel for each title, side by side in `lines` lines. settings: of make_subplots."""
    columns = -(-len(titles) // lines)
    return make_subplots(rows=lines, cols=columns, subplot_titles=titles, figure=Figure(), **settings)


def curve(
    figure: go.Figure, table: pd.DataFrame, column: str, name: str, hover: str, style: Mapping[str, str],
    x: str = "layer", /, **settings: object,
) -> None:  # fmt: skip
    """Adds a curve of a column by column `x`. hover: hover text, with plotly's places for the numbers.  style: color,
    and perhaps dash and symbol, as in STATUS_STYLES.  settings: of the curve, as plotly names them."""
    line = dict(color=style["color"], dash=style.get("dash", "solid"), width=2)
    marker = dict(symbol=style.get("symbol", "circle"), size=6)
    settings = {"mode": "lines+markers", "line": line, "marker": marker, **settings}
    x_values, y_values = table[x].tolist(), table[column].tolist()
    figure.add_scatter(x=x_values, y=y_values, name=name, hovertemplate=f"{hover}<extra></extra>", **settings)


def baseline(
    figure: go.Figure, table: pd.DataFrame, column: str, name: str, hover: str, dash: str, **settings: object
) -> None:
    """Adds a thin grey line of a column by layer, for comparison. hover, settings: as in `curve`."""
    line = dict(color=GREY, dash=dash, width=1.5)
    curve(figure, table, column, name, hover, {"color": GREY}, mode="lines", **{"line": line, **settings})


def require_lines(table: pd.DataFrame, message: str) -> None:
    """Raises: ValueError with this message for an empty table."""
    if table.empty:
        raise ValueError(message)


def _configured(settings: Mapping[str, object]) -> dict[str, object]:
    config = settings.get("config")
    return {**settings, "config": {**FIGURE_CONFIG, **(config if isinstance(config, Mapping) else {})}}


def layout_template(*, dark: bool = False) -> go.layout.Template:
    """Returns the plotly template of all figures, for a light or a dark page. Heat maps are violet unless a figure sets
    other colours, because the other colours stand for phases and statuses."""
    colours = _DARK if dark else _LIGHT
    line = colours["line"]
    axis = {"gridcolor": line, "linecolor": line, "zeroline": False, "ticks": "", "automargin": True}
    axis["title"] = {"font": {"size": 13}}
    scale = [[i / (len(_SCALES[dark]) - 1), shade] for i, shade in enumerate(_SCALES[dark])]
    return go.layout.Template(
        layout={
            "font": {"family": SANS, "size": 13, "color": colours["ink"]},
            "title": {"x": 0, "xref": "container", "xanchor": "left", "pad": {"l": 12}, "font": {"size": 16}},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {
                "bgcolor": colours["card"],
                "bordercolor": colours["line"],
                "font": {"color": colours["ink"]},
                "align": "left",
            },
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": colours["muted"], "activecolor": colours["ink"]},
            "coloraxis": {"colorscale": scale, "colorbar": {"outlinewidth": 0, "ticks": ""}},
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"},
        },
        data={"heatmap": [{"colorscale": scale, "colorbar": {"outlinewidth": 0, "ticks": ""}}]},
    )


def set_layout(
    figure: go.Figure, title: str, height: int, *, top: int | None = None, bottom: int = 48, left: int = 48,
    **settings: object,
) -> None:  # fmt: skip
    """Sets a figure's title, height in pixels and template. top, bottom, left: margins in pixels; plotly's own if `top`
    is None.  settings: of the layout, as plotly names them."""
    margin = None if top is None else dict(l=left, r=12, t=top, b=bottom)
    figure.update_layout(template=layout_template(), title=title, height=height, margin=margin, **settings)


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


_TINTS = "".join(
    f".cp .{name}{{fill:var(--{name});stroke:var(--{name}-edge)}}.cp .{name}-ink{{fill:var(--{name}-edge)}}"
    f".cp .{name}-stroke{{stroke:var(--{name}-edge)}}"
    for name in ("blue", "yellow", "green", "red", "grey")
)


def _rules(name: str) -> str:
    """Returns the CSS rules of the file css/NAME.css without its comments."""
    text = (Path(__file__).parent / "css" / f"{name}.css").read_text(encoding="utf-8")
    return re.sub(r"/\*.*?\*/\s*", "", text)


_COLOURS_CSS = (
    f".cp{{--sans:{SANS};--mono:{MONO};{_variables(_LIGHT)}}}"
    f"@media (prefers-color-scheme:dark){{.cp{{{_variables(_DARK)}}}}}{_TINTS}\n"
)
PAGE_CSS = _rules("page")

LEAST_CONTRAST = 4.5
"""Smallest contrast of a text to what is behind it (WCAG 2.1, level AA)."""
SHADES = 20
"""Number of violet shades, from weakest to strongest, of cells drawn without plotly: CSS classes v0 to v19."""


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """Returns the contrast of two colours, 1 to 21. one, other: red, green and blue, 0 to 1. Source: WCAG 2.1,
    "contrast ratio"."""
    lights = []
    for colour in (one, other):
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(lights) / min(lights)


def _rgb(colour: str) -> tuple[float, float, float]:
    """Returns red, green and blue, 0 to 1, of a colour such as "#1b2027" or "rgb(27, 32, 39)"."""
    is_hex = colour.startswith("#")
    red, green, blue = (
        int(part, 16 if is_hex else 10) for part in re.findall("[0-9a-f]{2}" if is_hex else r"\d+", colour)
    )
    return red / 255, green / 255, blue / 255


def _shade_rules(page: str, *, dark: bool) -> str:
    """Returns CSS rules of the shades and of the texts on them: the colour of other texts, or black or white where that
    has too little contrast."""
    texts = (_DARK if dark else _LIGHT)["ink"], "#ffffff", "#050607"
    rules = []
    for i, shade in enumerate(map(str, sample_colorscale(_SCALES[dark], SHADES))):
        text = next(text for text in texts if contrast(_rgb(text), _rgb(shade)) >= LEAST_CONTRAST)
        rules.append(f"{page}.cp .v{i} rect{{fill:{shade}}}{page}.cp svg .v{i} text{{fill:{text}}}")
    return "".join(rules)


SHADE_CSS = f"{_shade_rules('', dark=False)}@media (prefers-color-scheme:dark){{{_shade_rules('', dark=True)}}}"
"""CSS rules of the classes v0 to v19, light or dark as the browser prefers."""
DIAGRAM_CSS = _COLOURS_CSS + _rules("diagram") + SHADE_CSS + _rules("grid") + _rules("thoughts")
"""CSS rules of all pictures in SVG."""
PICTURE_CSS = DIAGRAM_CSS + _rules("cards")
"""CSS rules of all pictures and cards."""

THEME_CSS = "".join(
    f":root[data-theme={theme}] .cp{{{_variables(colours)}color-scheme:{theme}}}"
    + _shade_rules(f":root[data-theme={theme}] ", dark=theme == "dark")
    for theme, colours in (("light", _LIGHT), ("dark", _DARK))
)
"""CSS rules for a page with a light/dark switch of its own: the document's data-theme overrides the browser's
preference."""


def interval(table: pd.DataFrame, value: str, style: str, **counts: str) -> dict[str, object]:
    """Returns plotly's settings of a line or of bars with 95 % intervals, as a dict: `error_y`, thin bars from the
    column `low` to the column `high`; and `customdata`, one hover text for each line of the table, such as "0.81, 95 %
    0.78 to 0.84<br>900 examples".

    value: the column of the value.  style: a number format, such as ".1%".  counts: column name -> the word for what
    the column counts; columns that the table lacks are left out.
    """
    texts = []
    for line in table.to_dict("records"):
        text = f"{line[value]:{style}}, 95 % {line['low']:{style}} to {line['high']:{style}}"
        counted = [f"{line[column]} {what}" for column, what in counts.items() if column in line]
        texts.append(f"{text}<br>{', '.join(counted)}" if counted else text)
    return {"error_y": error_bars(table, value), "customdata": texts}


def error_bars(table: pd.DataFrame, value: str) -> dict[str, object]:
    """Returns plotly's `error_y` settings as a dict: thin bars from the column `low` to the column `high`, around the
    column that `value` names."""
    return dict(
        type="data", symmetric=False, array=(table.high - table[value]).tolist(),
        arrayminus=(table[value] - table.low).tolist(), thickness=1, width=0,
    )  # fmt: skip
