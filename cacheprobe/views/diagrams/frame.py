"""Puts a title, a note and CSS styles around a picture, for a page or for a notebook."""

from typing import NamedTuple

from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.card_style import CARD_CSS, GRID_CSS
from cacheprobe.views.style import DIAGRAM_CSS, SHADE_CSS
from cacheprobe.views.text import markup


class Markup(str):
    """Holds HTML as a str: a notebook shows the picture, and the text can be written to a file."""

    finding: str
    """Title of the picture as plain text: what the picture shows."""

    def __new__(cls, html: str, finding: str = "") -> "Markup":
        made = super().__new__(cls, html)
        made.finding = finding
        return made

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        """Returns a short text instead of the HTML, because a notebook stores this text beside the picture."""
        return f"Markup({self.finding!r}, {len(self)} characters of HTML)"


class TitledPicture(NamedTuple):
    """Holds a picture in three parts: title, note and HTML body."""

    title: str
    """Plain text."""
    note: str
    """HTML; "" for no note."""
    body: str
    """HTML: the picture and its legend."""

    @property
    def html(self) -> str:
        """HTML of title, note and body, for a page that already has the styles."""
        return f"<h2>{markup(self.title)}</h2>{self._note_html}{self.body}"

    @property
    def alone(self) -> Markup:
        """HTML of title, note and body with the styles of the diagrams, as a `Markup`, readable on a page of any
        colour."""
        return Markup(framed(f"<h3>{markup(self.title)}</h3>{self._note_html}{self.body}"), self.title)

    @property
    def _note_html(self) -> str:
        return f"<p class='note'>{self.note}</p>" if self.note else ""


def framed(body: str) -> str:
    """Returns HTML: `body` with the styles and textures of the diagrams, so that a page without styles can show the
    picture."""
    return (
        f'<div class="cp alone"><style>{DIAGRAM_CSS}{SHADE_CSS}{GRID_CSS}{CARD_CSS}</style>{svg.TEXTURES}{body}</div>'
    )
