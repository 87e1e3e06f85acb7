"""Puts a title, a note and styles around a picture, for a page or for a notebook."""

from typing import NamedTuple

from cacheprobe.plots.diagrams import svg
from cacheprobe.plots.diagrams.card_style import CARD_CSS, GRID_CSS
from cacheprobe.plots.style import DIAGRAM_CSS, SHADE_CSS
from cacheprobe.plots.text import markup


class Markup(str):
    """HTML that a notebook shows as a picture. As a str it is the HTML, which can be written to a file."""

    finding: str
    """What the picture shows, as plain text."""

    def __new__(cls, html: str, finding: str = "") -> "Markup":
        made = super().__new__(cls, html)
        made.finding = finding
        return made

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        """Returns a short text, because a notebook keeps it beside the picture."""
        return f"Markup({self.finding!r}, {len(self)} characters of HTML)"


class Piece(NamedTuple):
    """A picture with its title and note."""

    title: str
    """Plain text."""
    note: str
    """Markup; "" for none."""
    body: str
    """Markup: the picture and its legend."""

    @property
    def html(self) -> str:
        """HTML for a page that has the styles."""
        return f"<h2>{markup(self.title)}</h2>{self._said}{self.body}"

    @property
    def alone(self) -> Markup:
        """HTML with its styles, readable on a page of any colour."""
        return Markup(framed(f"<h3>{markup(self.title)}</h3>{self._said}{self.body}"), self.title)

    @property
    def _said(self) -> str:
        return f"<p class='note'>{self.note}</p>" if self.note else ""


def framed(body: str) -> str:
    """Returns the markup with the styles and textures that it needs to stand alone."""
    return (
        f'<div class="cp alone"><style>{DIAGRAM_CSS}{SHADE_CSS}{GRID_CSS}{CARD_CSS}</style>{svg.TEXTURES}{body}</div>'
    )
