"""Draws the shapes of the diagrams as SVG text: token chips, the cache cylinder, arrows, signs.

Coordinates are in pixels. This module escapes text arguments, so callers must not.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cacheprobe.views.text import columns_of, markup, token_label

_TOKEN_COLUMN = 6.7
"""Width of one letter of the 11 px monospaced font in pixels, rounded up."""

# One texture for each kind. Its strokes take their colour from the page's variables.
_TEXTURES = {
    "ruled-blue": ("blue", 6, 5, '<path d="M0 2.5h6" stroke-width=".9" opacity=".45"/>'),
    "provisional": ("yellow", 8, 6, '<path d="M1 2h4M5 5h4M-3 5h4" stroke-width="1.1" opacity=".55"/>'),
    "pending": ("green", 6, 6, '<path d="M-1 7 7-1M-1 1 1-1M5 7 7 5" stroke-width="1.3" opacity=".7"/>'),
    "verified": ("green", 5, 5, '<path d="M2.5 0v5" stroke-width=".9" opacity=".4"/>'),
    "crossed-yellow": ("yellow", 6, 6, '<path d="M0 0 6 6M6 0 0 6" stroke-width="1" opacity=".85"/>'),
    "crossed-grey": ("grey", 6, 6, '<path d="M0 0 6 6M6 0 0 6" stroke-width="1" opacity=".85"/>'),
    "dotted-yellow": ("yellow", 6, 6, '<path d="M3 3h.01" stroke-width="2.2" stroke-linecap="round"/>'),
    "crossed-green": ("green", 6, 6, '<path d="M0 0 6 6M6 0 0 6" stroke-width="1" opacity=".7"/>'),
    "dotted-green": ("green", 6, 6, '<path d="M3 3h.01" stroke-width="2.2" stroke-linecap="round"/>'),
    "rolled-back": ("red", 7, 7, '<path d="M1 1 6 6M6 1 1 6" stroke-width="1.1" opacity=".55"/>'),
    "ruled-grey": ("grey", 6, 5, '<path d="M0 2.5h6" stroke-width=".9" opacity=".45"/>'),
    "dotted-grey": ("grey", 6, 6, '<path d="M3 3h.01" stroke-width="2.2" stroke-linecap="round"/>'),
    "waiting": ("blue", 6, 6, '<path d="M-1 7 7-1M-1 1 1-1M5 7 7 5" stroke-width="1.2" opacity=".7"/>'),
    "undone": ("red", 6, 6, '<path d="M-1-1 7 7M5-1 7 1M-1 5 1 7" stroke-width="1.1" opacity=".6"/>'),
}


def _pattern(name: str, colour: str, width: int, height: int, strokes: str) -> str:
    return (
        f'<pattern id="cp-{name}" width="{width}" height="{height}" patternUnits="userSpaceOnUse">'
        f'<g class="{colour}-stroke" fill="none">{strokes}</g></pattern>'
    )


TEXTURES = (
    '<svg width="0" height="0" style="position:absolute;width:0;height:0" aria-hidden="true"><defs>'
    + "".join(_pattern(name, *texture) for name, texture in _TEXTURES.items())
    + "</defs></svg>"
)
"""SVG definitions of the textures that boxes and cylinders refer to; needed once on each page or fragment."""


def text(x: float, y: float, content: str, classes: str = "", anchor: str = "start") -> str:
    """Returns an SVG text element at (x, y); `content` is escaped."""
    return f'<text x="{x:g}" y="{y:g}" class="{classes}" text-anchor="{anchor}">{markup(content)}</text>'


def box(
    x: float, y: float, width: float, height: float, colour: str, texture: str | None = None, *,
    radius: float = 5, tip: str = "",
) -> str:  # fmt: skip
    """Returns SVG of a rectangle with round corners, with a colour and perhaps a texture. `tip` is the hover text."""
    shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
    title = f"<title>{markup(tip)}</title>" if tip else ""
    filled = f'<rect {shape} class="texture" style="fill:url(#cp-{texture})"/>' if texture else ""
    return f'<g><rect {shape} class="box {colour}"/>{filled}{title}</g>'


def swatch(x: float, y: float, colour: str, texture: str | None = None) -> str:
    """Returns SVG of a box of 18 x 13 px with one colour and texture, for a legend; the colour "gone" gives a dashed
    red outline."""
    if colour == "gone":
        return f'<rect x="{x:g}" y="{y:g}" width="18" height="13" rx="3" class="box red-stroke gone"/>'
    return box(x, y, 18, 13, colour, texture, radius=3)


class Chip(NamedTuple):
    """Describes a token as a box: its name (such as T1), text, colour, texture, sign at the corner (check, cross, plus
    or turn) and the end of its hover text."""

    name: str
    token: str
    colour: str
    texture: str | None = None
    sign: str | None = None
    tip: str = ""


def chip(x: float, y: float, width: float, drawn: Chip) -> str:
    """Returns SVG of a token as a box 40 px high: its name above its text, which is cut to fit. The hover text has the
    whole text."""
    halo = f"halo on-{drawn.colour}"
    label = token_label(drawn.token, int((width - 6) / _TOKEN_COLUMN))
    brief = " brief" if columns_of(label) <= 3 else ""  # a lone comma is hard to see
    centre = x + width / 2
    parts = [
        box(x, y, width, 40, drawn.colour, drawn.texture),
        text(centre, y + 16, drawn.name, f"strong {halo}", "middle"),
        text(centre, y + 33, label, f"token {halo}{brief}", "middle"),
    ]
    if drawn.sign:
        parts.append(badge(x + width - 3, y + 2, drawn.sign))
    tip = f"{drawn.name}: {drawn.token!r}{'; ' + drawn.tip if drawn.tip else ''}"
    return f'<g class="chip">{"".join(parts)}<title>{markup(tip)}</title></g>'


def badge(x: float, y: float, sign: str) -> str:
    """Returns SVG of a sign (check, cross, plus or turn) on a small disc at (x, y), for the corner of a chip. The disc
    is red for a cross, else green."""
    colour = "red" if sign == "cross" else "green"
    return f'<circle cx="{x:g}" cy="{y:g}" r="7" class="box {colour}"/>{mark(x, y, sign, 0.7)}'


def mark(x: float, y: float, sign: str, scale: float = 1.0) -> str:
    """Returns SVG of a sign centred on (x, y). sign: check (accepted), cross (rejected), plus (bonus) or turn
    (recovered)."""
    path = {
        "check": "M-5 0-1.5 4 5-4",
        "cross": "M-4-4 4 4M4-4-4 4",
        "plus": "M-5 0H5M0-5V5",
        "turn": "M-4 4V-1A4 4 0 0 1 4-1V2M1 0 4 3.5 7 0",
    }[sign]
    colour = "red" if sign == "cross" else "green"
    return f'<path d="{path}" transform="translate({x:g} {y:g}) scale({scale:g})" class="sign {colour}-stroke"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Returns SVG of a straight arrow from (x1, y1) to (x2, y2), which must be vertical, or horizontal to the right."""
    size = 4
    if y1 == y2:
        head = f"M{x2 - size:g} {y2 - size:g} {x2:g} {y2:g} {x2 - size:g} {y2 + size:g}"
    else:
        back = size if y2 < y1 else -size
        head = f"M{x2 - size:g} {y2 + back:g} {x2:g} {y2:g} {x2 + size:g} {y2 + back:g}"
    return f'<path d="M{x1:g} {y1:g} {x2:g} {y2:g}{head}" class="arrow"/>'


def cylinder(x: float, y: float, width: float, bands: Sequence[tuple[str, str | None, float, int, str]]) -> str:
    """Returns SVG of the KV cache as a cylinder at (x, y), `width` px wide. bands: from the top down, at least one:
    (colour, or "gone" for an empty outline; texture; height in pixels; number of cache slots between which lines are
    drawn, 0 for no lines; hover text)."""
    rx, ry = width / 2, 9
    parts = []
    top = y
    for colour, texture, height, slots, tip in bands:
        arc = f"A{rx:g} {ry} 0 0 0 {x + width:g} "
        path = f"M{x:g} {top:g}V{top + height:g}{arc}{top + height:g}V{top:g}A{rx:g} {ry} 0 0 1 {x:g} {top:g}Z"
        outline = f'<path d="{path}" class="box {"red-stroke gone" if colour == "gone" else colour}"/>'
        over = f'<path d="{path}" class="texture" style="fill:url(#cp-{texture})"/>' if texture else ""
        parts.append(f"<g>{outline}{over}<title>{markup(tip)}</title></g>")
        ruled = "red-stroke gone" if colour == "gone" else f"{colour}-stroke"
        for line in (top + height * slot / slots for slot in range(1, slots)):
            parts.append(f'<path d="M{x:g} {line:g}{arc}{line:g}" fill="none" class="{ruled}" opacity=".6"/>')
        top += height
    lid = f'<ellipse cx="{x + rx:g}" cy="{y:g}" rx="{rx:g}" ry="{ry}" class="box {bands[0][0]}"/>'
    return "".join([*parts, lid])


def picture(width: float, height: float, label: str, parts: list[str], *, style: str = "") -> str:
    """Returns one <svg> element with these parts, for a page. The picture is as wide as the element around it, within
    the limits of the CSS rules `style`. Screen readers read `label`."""
    limits = f' style="{style}"' if style else ""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}"{limits} role="img" aria-label="{markup(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
