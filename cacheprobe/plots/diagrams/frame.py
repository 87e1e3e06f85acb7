"""What a picture of ours needs around it: a title and a note on a page, and its styles too where it stands alone."""

from typing import NamedTuple

from cacheprobe.plots.diagrams import svg
from cacheprobe.plots.diagrams.card_style import CARD_CSS
from cacheprobe.plots.style import DIAGRAM_CSS, SHADE_CSS
from cacheprobe.plots.text import markup


class Markup(str):
    """A piece of HTML that a notebook shows as a picture. Its text is the HTML, to be written to a file."""

    finding: str
    """What it shows, as plain text."""

    def __new__(cls, html: str, finding: str = "") -> "Markup":
        made = super().__new__(cls, html)
        made.finding = finding
        return made

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        """Short: a notebook keeps it beside the picture."""
        return f"Markup({self.finding!r}, {len(self)} characters of HTML)"


class Piece(NamedTuple):
    """A picture with what is said of it."""

    title: str
    """Plain text."""
    note: str
    """Markup; "" for none."""
    body: str
    """Markup: the picture, and the keys to its colours."""

    @property
    def html(self) -> str:
        """For a page that has the styles."""
        return f"<h2>{markup(self.title)}</h2>{self._said}{self.body}"

    @property
    def alone(self) -> Markup:
        """With the styles that it needs, and text that can be read on a page of any colour."""
        return Markup(framed(f"<h3>{markup(self.title)}</h3>{self._said}{self.body}"), self.title)

    @property
    def _said(self) -> str:
        return f"<p class='note'>{self.note}</p>" if self.note else ""


def framed(body: str) -> str:
    """Markup with the styles and textures that it needs to stand alone."""
    return f'<div class="cp alone"><style>{DIAGRAM_CSS}{SHADE_CSS}{CARD_CSS}</style>{svg.TEXTURES}{body}</div>'
