"""Puts titles, notes and CSS styles around pictures: for a page, a notebook, or an SVG file for other programs."""

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from html import unescape
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from cacheprobe.core.files import write_whole
from cacheprobe.views.diagrams import svg
from cacheprobe.views.images import kind_of, page_image, svg_image
from cacheprobe.views.style import DIAGRAM_CSS, PICTURE_CSS, SANS
from cacheprobe.views.text import columns_of, markup


class Markup(str):
    """Holds HTML of a picture as a str: a notebook shows the picture, and the text can be written to a file. Its
    attributes have the parts, for a page that already has the styles."""

    finding: str = ""
    """Title of the picture as plain text: what the picture shows."""
    note: str = ""
    """HTML below the title; "" for no note."""
    body: str = ""
    """HTML of the picture."""
    legend: str = ""
    """HTML of the legend; "" if it is part of the body."""
    draw: Callable[[], "Drawing"] | None = None
    """Returns the picture as an SVG file, with title, note and legend; None for a picture that is not SVG alone, or
    whose SVG file `drawing` makes of its parts."""
    data: "Mapping[str, pd.DataFrame | tuple[pd.DataFrame, ...]]" = MappingProxyType({})
    """Tables that the picture was drawn from, by the name of the function's argument."""

    @classmethod
    def of(
        cls, finding: str, body: str, note: str = "", legend: str = "", draw: Callable[[], "Drawing"] | None = None
    ) -> "Markup":
        """Returns the HTML of a picture with the styles and textures of the diagrams, readable on a page of any
        colour."""
        inside = f"<h3>{markup(finding)}</h3>{_note_html(note)}{body}{legend}"
        made = cls(f'<div class="cp alone"><style>{PICTURE_CSS}</style>{svg.TEXTURES}{inside}</div>')
        made.finding, made.note, made.body, made.legend, made.draw = finding, note, body, legend, draw
        return made

    @property
    def html(self) -> str:
        """HTML of title, note, body and legend, for a page that already has the styles."""
        return f"<h2>{markup(self.finding)}</h2>{_note_html(self.note)}{self.body}{self.legend}"

    def drawing(self) -> "Drawing | None":
        """Returns the picture as an SVG file; None for a picture that is not one SVG with a legend, such as a card."""
        if self.draw is not None:
            return self.draw()
        found = _ONE_SVG.fullmatch(self.body)
        keys = [(drawn, unescape(meaning)) for drawn, meaning in _KEY.findall(self.legend)]
        return None if found is None else picture_alone(self.finding, found[1], keys, self.note)

    def write_html(self, file: "str | Path") -> Path:
        """Writes the picture to an HTML page that needs no other file, and returns the path."""
        return write_whole(Path(file), lambda beside: beside.write_text(self._page(), encoding="utf-8"))

    def write_image(self, file: "str | Path", format: str | None = None) -> Path:
        """Writes the picture to a PNG, PDF or SVG file on a white ground, and returns the path. format: by default the
        ending of `file`.

        Raises: ValueError for another format, and for the SVG of a picture that is HTML; ImageError if there is no
        browser to draw with, which an SVG file does not need.
        """
        kind, drawing = kind_of(file, format), self.drawing()
        if drawing is None and kind == "svg":
            raise ValueError(f"{self.finding!r:.60} is HTML, and no SVG; write .png, .pdf, or .html with write_html")
        if drawing is None:
            content = page_image(self._page(), kind)
        else:
            content = drawing.markup.encode() if kind == "svg" else svg_image(*drawing, kind)
        return write_whole(Path(file), lambda beside: beside.write_bytes(content))

    def _page(self) -> str:
        """Returns the picture as a whole page of HTML."""
        head = f'<meta charset="utf-8"><title>{markup(self.finding)}</title>'
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{self}</body></html>'

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        """Returns a short text instead of the HTML, because a notebook stores this text beside the picture."""
        return f"Markup({self.finding!r}, {len(self)} characters of HTML)"


_ONE_SVG = re.compile(r"(?:<div class=['\"]scroll['\"]>)?(<svg (?:(?!<svg ).)*</svg>)(?:</div>)?", re.DOTALL)
"""The body of a picture that is one SVG."""
_KEY = re.compile(r'<li><svg viewBox="0 0 26 18" aria-hidden="true">(.*?)</svg>(.*?)</li>', re.DOTALL)
"""One entry of a `legend`."""


def _note_html(note: str) -> str:
    return f"<p class='note'>{note}</p>" if note else ""


def legend(entries: Iterable[tuple[str, str]], first: str = "") -> str:
    """Returns a legend as an HTML list. entries: (SVG elements within 26 x 18 px, meaning).  first: HTML of list items
    to put before the entries."""
    items = "".join(
        f'<li><svg viewBox="0 0 26 18" aria-hidden="true">{drawn}</svg>{meaning}</li>' for drawn, meaning in entries
    )
    return f'<ul class="legend">{first}{items}</ul>'


class Panel(NamedTuple):
    """Holds one phase of a request (prefill, decode, verify or outcome): heading and note as text without < and & (both
    are inserted unescaped), picture as SVG, sentence as HTML with escaped tokens."""

    heading: str
    note: str
    picture: str
    sentence: str
    classes: str = "panel"

    @property
    def html(self) -> str:
        """The panel as an HTML section."""
        head = f"<h4>{self.heading} <small>{self.note}</small></h4>"
        return f'<section class="{self.classes}">{head}{self.picture}<p>{self.sentence}</p></section>'


_MARGIN, _HEAD, _LINE = 16, 44, 18
_LEAST = 480
"""Least width in pixels of a picture in an SVG file: title and legend need it."""
_LETTER = 7.0
"""Average width of a letter at 13 px, in pixels."""
_DARK = re.compile(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
_RULE = re.compile(r"([^{}]+)\{([^{}]*)\}")
_OF_PAGES = re.compile(r"\.(panels?|legend|note)\b|svg$")
_OWN_CSS = f".cp text{{font:12px {SANS}}}.cp .title{{font-size:17px;font-weight:650}}.cp .said{{font-size:13px}}"


class Drawing(NamedTuple):
    """Holds a whole SVG file as text, with its width and height in pixels."""

    markup: str
    width: int
    height: int


def panels_alone(title: str, panels: Sequence[Panel], keys: Sequence[tuple[str, str]]) -> Drawing:
    """Returns a `Drawing` (an SVG file) of panels side by side, with a title above and the legend below.

    keys: (SVG elements, meaning) of each entry of the legend, from `diagram.KEYS`.
    """
    gap, panel_width = 28, max(_size_of(panel.picture)[0] for panel in panels)
    heights = [_size_of(panel.picture)[1] for panel in panels]
    sentences = [_wrapped(_without_tags(panel.sentence), panel_width) for panel in panels]
    width = len(panels) * panel_width + (len(panels) - 1) * gap
    picture_end = 34 + max(heights)
    parts = []
    for i, (panel, lines) in enumerate(zip(panels, sentences, strict=True)):
        x = i * (panel_width + gap)
        parts += [
            svg.text(x, 16, panel.heading, "strong"),
            svg.text(x + panel_width, 16, panel.note, "muted", "end"),
            _moved_to(x, 28, _inside(panel.picture)),
            *(svg.text(x, picture_end + 18 + _LINE * n, line, "said muted") for n, line in enumerate(lines)),
        ]
    bottom = picture_end + _LINE * max(map(len, sentences))
    return picture_alone(title, svg.picture(width, bottom, "", parts), keys)


def picture_alone(title: str, picture: str, keys: Sequence[tuple[str, str]], note: str = "") -> Drawing:
    """Returns a `Drawing` (an SVG file) of one picture, with a title above, and a note and the legend below.

    title: plain text.  picture: from `svg.picture`.  keys: (SVG elements, meaning) of each entry of the legend.
    note: HTML.
    """
    width, height = _size_of(picture)
    width = max(width, _LEAST)
    title_lines, note_lines = _wrapped(title, width / 1.35), _wrapped(_without_tags(note), width) if note else []
    top = _HEAD + 24 * (len(title_lines) - 1)
    y = top + height + 20
    parts = [svg.text(_MARGIN, 28 + 24 * n, line, "title") for n, line in enumerate(title_lines)]
    parts.append(_moved_to(_MARGIN, top, _inside(picture)))
    parts += [svg.text(_MARGIN, y + _LINE * n, line, "said muted") for n, line in enumerate(note_lines)]
    x, y, width = float(_MARGIN), y + _LINE * len(note_lines) + 8, width + 2 * _MARGIN
    for sign, meaning in keys:
        entry_width = 26 + _LETTER * columns_of(meaning) + 18
        if x + entry_width > width and x > _MARGIN:
            x, y = float(_MARGIN), y + 24
        parts += [_moved_to(x, y, sign), svg.text(x + 26, y + 13, meaning, "said")]
        x += entry_width
    height = y + 24 + _MARGIN
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="cp" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}"><style>{_css()}</style>{_inside(svg.TEXTURES)}'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n',
        round(width), round(height),
    )  # fmt: skip


@cache
def _css() -> str:
    """Returns the CSS rules of an SVG file on white, as text: colour variables are replaced by their values, and rules
    for dark mode and for pages left out."""
    rules = [(selector.strip(), body) for selector, body in _RULE.findall(_DARK.sub("", DIAGRAM_CSS))]
    colours = dict(
        pair for selector, body in rules if selector == ".cp" for pair in re.findall(r"(--[\w-]+):([^;]+)", body)
    )
    kept = [(selector, body) for selector, body in rules if selector != ".cp" and not _OF_PAGES.search(selector)]
    css = _OWN_CSS + "".join(f"{selector.replace('.cp svg ', '.cp ')}{{{body}}}" for selector, body in kept)
    return re.sub(r"var\((--[\w-]+)\)", lambda variable: colours[variable.group(1)].strip(), css)


def _size_of(picture: str) -> tuple[float, float]:
    view_box = re.search(r'viewBox="0 0 (\S+) (\S+)"', picture)
    assert view_box is not None
    width, height = view_box.groups()
    return float(width), float(height)


def _inside(picture: str) -> str:
    """Returns the text inside the outermost <svg> element."""
    return picture.partition(">")[2].rpartition("</svg>")[0]


def _moved_to(x: float, y: float, strokes: str) -> str:
    return f'<g transform="translate({x:g} {y:g})">{strokes}</g>'


def _without_tags(sentence: str) -> str:
    """Returns HTML as plain text."""
    return unescape(re.sub(r"<[^>]*>", "", sentence))


def _wrapped(text: str, width: float) -> list[str]:
    return textwrap.wrap(text, max(int(width / _LETTER), 16), break_long_words=False, break_on_hyphens=False) or [""]
