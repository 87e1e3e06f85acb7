"""Writes diagrams as SVG files that need no HTML page: their colours are written out, so that other programs can show
the files."""

import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from cacheprobe.plots.diagrams import svg
from cacheprobe.plots.diagrams.panels import Panel
from cacheprobe.plots.style import DIAGRAM_CSS, SANS
from cacheprobe.plots.text import columns_of

_MARGIN, _HEAD, _LINE = 16, 44, 18
_LETTER = 7.0
"""Average width of a letter at 13 px, in pixels."""
_DARK = re.compile(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_OF_PAGES = re.compile(r"\.(panels?|legend|thoughts|wide|note)\b|svg$")
_OWN_CSS = f".cp text{{font:12px {SANS}}}.cp .title{{font-size:17px;font-weight:650}}.cp .said{{font-size:13px}}"


class Drawing(NamedTuple):
    """Holds a whole SVG file as text, with its width and height in pixels."""

    markup: str
    width: int
    height: int


def panels_alone(title: str, panels: Sequence[Panel], keys: Sequence[tuple[str, str]]) -> Drawing:
    """Returns a `Drawing` (an SVG file) of panels side by side, with a title above and the legend below.

    keys: (SVG elements, meaning) of each entry of the legend, from `diagram.keys`.
    """
    gap, wide = 28, max(_size(panel.picture)[0] for panel in panels)
    heights = [_size(panel.picture)[1] for panel in panels]
    said = [_wrapped(_plain(panel.sentence), wide) for panel in panels]
    width = 2 * _MARGIN + len(panels) * wide + (len(panels) - 1) * gap
    floor = _HEAD + 34 + max(heights)
    parts = []
    for i, (panel, lines) in enumerate(zip(panels, said, strict=True)):
        x = _MARGIN + i * (wide + gap)
        parts += [
            _escaped(x, _HEAD + 16, panel.heading, "strong"),
            _escaped(x + wide, _HEAD + 16, panel.note, "muted", "end"),
            _moved(x, _HEAD + 28, _inner(panel.picture)),
            *(_escaped(x, floor + 18 + _LINE * n, line, "said muted") for n, line in enumerate(lines)),
        ]
    bottom = floor + 18 + _LINE * max(map(len, said))
    return _whole(title, width, bottom, parts, keys)


def picture_alone(
    title: str, picture: str, keys: Sequence[tuple[str, str]], note: str, *, styles: str = "", textures: str = ""
) -> Drawing:
    """Returns a `Drawing` (an SVG file) of one picture, with a title above, and a note and the legend below.

    picture: from `svg.picture`.  keys: (SVG elements, meaning) of each entry of the legend.
    styles, textures: CSS rules and SVG definitions of this picture, used together with those of every diagram.
    """
    width, height = _size(picture)
    width += 2 * _MARGIN
    heads = _wrapped(title, (width - 2 * _MARGIN) / 1.35)
    top = _HEAD + 24 * (len(heads) - 1)
    lines = _wrapped(_plain(note), width - 2 * _MARGIN)
    parts = [_moved(_MARGIN, top, _inner(picture))]
    parts += [_escaped(_MARGIN, top + height + 20 + _LINE * n, line, "said muted") for n, line in enumerate(lines)]
    return _whole("\n".join(heads), width, top + height + 20 + _LINE * len(lines), parts, keys, styles, textures)


def _whole(
    title: str,
    width: float,
    bottom: float,
    parts: list[str],
    keys: Sequence[tuple[str, str]],
    styles: str = "",
    textures: str = "",
) -> Drawing:
    x, y = float(_MARGIN), bottom + 8
    for drawn, meaning in keys:
        needed = 26 + _LETTER * columns_of(meaning) + 18
        if x + needed > width and x > _MARGIN:
            x, y = float(_MARGIN), y + 24
        parts += [_moved(x, y, drawn), _escaped(x + 26, y + 13, meaning, "said")]
        x += needed
    height = y + 24 + _MARGIN
    heads = [_escaped(_MARGIN, 28 + 24 * n, line, "title") for n, line in enumerate(title.split("\n"))]
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="cp" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}"><style>{_css(styles)}</style>{_inner(svg.TEXTURES)}{_inner(textures)}'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join([*heads, *parts])}</svg>\n',
        round(width), round(height),
    )  # fmt: skip


def _css(more: str) -> str:
    """Returns the CSS rules of an SVG file on white: each colour variable is replaced by its value, and rules for dark
    mode and for pages are left out. more: rules of one picture, added to those of every diagram."""
    rules = [(s.strip(), body) for s, body in _RULE.findall(_DARK.sub("", DIAGRAM_CSS + more))]
    named = dict(pair for s, body in rules if s == ".cp" for pair in re.findall(r"(--[\w-]+):([^;]+)", body))
    kept = [(s, body) for s, body in rules if s != ".cp" and not _OF_PAGES.search(s)]
    css = _OWN_CSS + "".join(f"{s.replace('.cp svg ', '.cp ')}{{{body}}}" for s, body in kept)
    return re.sub(r"var\((--[\w-]+)\)", lambda found: named[found.group(1)].strip(), css)


def _size(picture: str) -> tuple[float, float]:
    found = re.search(r'viewBox="0 0 (\S+) (\S+)"', picture)
    assert found is not None
    width, height = found.groups()
    return float(width), float(height)


def _inner(picture: str) -> str:
    """Returns the text inside the outermost <svg> element; "" for an empty text."""
    return picture.partition(">")[2].rpartition("</svg>")[0]


def _moved(x: float, y: float, strokes: str) -> str:
    return f'<g transform="translate({x:g} {y:g})">{strokes}</g>'


def _plain(sentence: str) -> str:
    """Returns the HTML text without its tags; escaped characters stay escaped."""
    return re.sub(r"<[^>]*>", "", sentence)


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(int(width / _LETTER), 16), break_long_words=False, break_on_hyphens=False) or [""]


def _escaped(x: float, y: float, content: str, classes: str, anchor: str = "start") -> str:
    """Returns an SVG text element at (x, y). content: text that is already escaped."""
    return f'<text x="{x:g}" y="{y:g}" class="{classes}" text-anchor="{anchor}">{content}</text>'
