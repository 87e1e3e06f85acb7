"""Draws curves by layer and bars as SVG, without plotly: small enough for the first screen, and for a report."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cacheprobe.views.diagrams import svg
from cacheprobe.views.text import markup

WIDTH, HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 16, 40
_STYLE = "min-width:440px;max-width:760px"
_SHAPES = {
    "circle": '<circle cx="{x:g}" cy="{y:g}" r="3.2" class="{colour}-ink"/>',
    "square": '<rect x="{x0:g}" y="{y0:g}" width="6" height="6" class="{colour}-ink"/>',
    "cross": '<path d="M{x0:g} {y0:g}l6 6m-6 0l6-6" class="curve {colour}-stroke"/>',
    "diamond": '<path d="M{x:g} {y0:g}l4 3-4 4-4-4z" class="{colour}-ink"/>',
}


class Style(NamedTuple):
    """Says how a curve is drawn: its colour, the marks at its points, and the pattern of its line ("" for none)."""

    colour: str
    shape: str
    dash: str = ""


class Curve(NamedTuple):
    """Holds one curve: its name for the legend, how it is drawn, and its points as (x, y, hover text)."""

    name: str
    style: Style
    points: Sequence[tuple[float, float, str]]


class Bar(NamedTuple):
    """Holds one bar: its label below the axis ("" for none), its height from 0 to 1 (None: there is nothing to show),
    its colour, and its hover text."""

    label: str
    share: float | None
    colour: str
    says: str


def curve_chart(curves: Sequence[Curve], across: str, label: str, marked: tuple[int, str] | None = None) -> str:
    """Returns SVG of curves of shares, from 0 to 1, by layer. across: name of the horizontal axis.  label: for screen
    readers.  marked: a layer to mark with a line, and what the line says."""
    layers = sorted({x for curve in curves for x, _, _ in curve.points} | ({marked[0]} if marked else set()))
    low, span = layers[0], max(layers[-1] - layers[0], 1)
    inner = WIDTH - _LEFT - _RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        """Returns the pixels of a point."""
        return round(_LEFT + 8 + (inner - 16) * (x - low) / span, 1), round(_height(y), 1)

    parts = [_grid(), svg.text(_LEFT + inner / 2, HEIGHT - 4, across, "small muted", "middle")]
    step = next(step for step in (1, 2, 5, 10, 20, 50, 10**6) if span <= 12 * step)
    for layer in (layer for layer in range(int(low), int(layers[-1]) + 1) if layer % step == 0):
        parts.append(svg.text(place(layer, 0)[0], HEIGHT - _BOTTOM + 16, str(layer), "small muted", "middle"))
    if marked:
        x, near_end = place(marked[0], 0)[0], marked[0] - low > span / 2
        parts.append(f'<path d="M{x:g} {_TOP}V{_height(0):g}" class="rule" stroke-dasharray="2 3"/>')
        parts.append(
            svg.text(x + 4 if near_end else x - 4, _TOP - 3, marked[1], "small muted", "end" if near_end else "start")
        )
    for curve in curves:
        places = [place(x, y) for x, y, _ in curve.points]
        path = "L".join(f"{x:g} {y:g}" for x, y in places)
        parts.append(f'<path d="M{path}" class="curve {curve.style.colour}-stroke"{_dashed(curve.style)}/>')
        for (x, y), (_, _, says) in zip(places, curve.points, strict=True):
            parts.append(f"<g>{_mark(x, y, curve.style)}<title>{markup(says)}</title></g>")
    return f"<div class='scroll'>{svg.picture(WIDTH, HEIGHT, label, parts, style=_STYLE)}</div>"


def curve_keys(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """Returns the entries of a legend of curves, as `frame.legend` takes them."""
    return [
        (
            f'<path d="M0 9H26" class="curve {curve.style.colour}-stroke"{_dashed(curve.style)}/>'
            f"{_mark(13, 9, curve.style)}",
            markup(curve.name),
        )
        for curve in curves
    ]


def bar_chart(
    bars: Sequence[Bar], across: str, label: str, wrap: Callable[[int, str], str] = lambda _, inside: inside
) -> str:
    """Returns SVG of bars of shares, from 0 to 1, with their values above them if there is room. across, label: as in
    `curve_chart`.  wrap: function (number of the bar, SVG of the bar) -> SVG, for bars that can be pressed."""
    inner, floor = WIDTH - _LEFT - _RIGHT, _height(0)
    pitch = inner / max(len(bars), 1)
    width = min(max(pitch * 0.72, 0.8), 46)
    parts = [_grid(), svg.text(_LEFT + inner / 2, HEIGHT - 4, across, "small muted", "middle")]
    for number, bar in enumerate(bars):
        left, top = _LEFT + pitch * number, floor if bar.share is None else _height(bar.share)
        x = left + (pitch - width) / 2
        drawn = f'<rect x="{left:.1f}" y="{_TOP}" width="{pitch:.1f}" height="{floor - _TOP:g}" class="room"/>'
        drawn += f'<rect x="{x:.1f}" y="{top - 1:.1f}" width="{width:.1f}" height="{floor - top + 1:.1f}" class="'
        drawn += f'{bar.colour}-ink"/><title>{markup(bar.says)}</title>'
        parts.append(wrap(number, f'<g class="bar">{drawn}</g>'))
        if bar.label:
            parts.append(svg.text(left + pitch / 2, floor + 16, bar.label, "small muted", "middle"))
        if bar.share is not None and pitch >= 34:
            parts.append(
                svg.text(left + pitch / 2, max(top - 5, _TOP), f"{bar.share:.0%}", "small halo on-paper", "middle")
            )
    return f"<div class='scroll'>{svg.picture(WIDTH, HEIGHT, label, parts, style=_STYLE)}</div>"


def _height(share: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - share)


def _grid() -> str:
    """Returns SVG of the lines at 0 to 100 % and of their labels."""
    shares = (0, 0.25, 0.5, 0.75, 1)
    lines = "".join(f'<path d="M{_LEFT} {_height(y):g}H{WIDTH - _RIGHT}" class="rule"/>' for y in shares)
    return lines + "".join(svg.text(_LEFT - 6, _height(y) + 4, f"{y:.0%}", "small muted", "end") for y in shares)


def _dashed(style: Style) -> str:
    return f' stroke-dasharray="{style.dash}"' if style.dash else ""


def _mark(x: float, y: float, style: Style) -> str:
    return _SHAPES[style.shape].format(x=x, y=y, x0=x - 3, y0=y - 3, colour=style.colour)
