"""Builds an HTML page that needs no other file, with styles, a list of contents, pictures and tables."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import Markup
from cacheprobe.views.style import PAGE_CSS, PICTURE_CSS
from cacheprobe.views.text import markup

# The page needs no other file, so the policy forbids the browser to fetch any.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

_TIP_SCRIPT = """
(function () {
  const tip = document.getElementById("tip");
  // a cell of a grid and its column have hover texts in data-says; other parts of pictures in a <title>
  const says = (target) => {
    const cell = target.closest("[data-says]"), column = cell && cell.parentNode.closest("[data-says]");
    return cell ? (column ? column.dataset.says + "\\n" : "") + cell.dataset.says : "";
  };
  const show = (text, {clientX, clientY}) => {
    tip.hidden = !text;
    tip.textContent = text;
    tip.style.left = Math.max(Math.min(clientX + 12, innerWidth - tip.offsetWidth - 4), 4) + "px";
    tip.style.top = Math.max(Math.min(clientY + 12, innerHeight - tip.offsetHeight - 4), 4) + "px";
  };
  document.addEventListener("pointerover", (event) => show(says(event.target), event));
  // browsers show a <title> below a resting mouse; touch screens have no such mouse, so a tap shows it
  document.addEventListener("pointerup", (event) => {
    const part = event.target.closest("svg :has(> title)");
    show(says(event.target) || (part ? part.querySelector(":scope > title").textContent : ""), event);
  });
  addEventListener("scroll", () => { tip.hidden = true; }, true);
})();
"""


def page(title: str, body: str) -> str:
    """Returns a whole HTML document as text, with the styles of diagrams and reports. title: plain text. body: HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="referrer" content="no-referrer">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{markup(title)}</title><style>{PICTURE_CSS}{PAGE_CSS}</style></head>\n"
        f'<body class="cp">{svg.TEXTURES}<main>{body}</main>\n'
        f"<div id='tip' hidden></div><script>{_TIP_SCRIPT}</script></body></html>\n"
    )


def with_contents(head: str, sections: Sequence[tuple[str, str]]) -> str:
    """Returns HTML: `head`, a list of links to the sections by their headings, and the sections. sections: id and HTML
    of each; each begins with an <h2>, which gets the id."""
    links = []
    for name, section in sections:
        title = re.sub(r"<[^>]*>", "", section[len("<h2>") : section.index("</h2>")])
        links.append(f'<li><a href="#{name}">{title}</a></li>')
    bodies = "\n".join(section.replace("<h2>", f'<h2 id="{name}">', 1) for name, section in sections)
    return f'{head}<nav class="contents" aria-label="Contents"><ol>{"".join(links)}</ol></nav>{bodies}'


class Link(NamedTuple):
    """Holds a link: its text, and the address that it leads to. Both are plain text."""

    text: str
    address: str


def link(to: Link) -> str:
    """Returns a link as HTML. One that leads to another page opens beside this one."""
    beside = "" if to.address.startswith("#") else ' target="_blank" rel="noreferrer noopener"'
    return f'<a href="{markup(to.address)}"{beside}>{markup(to.text)}</a>'


def block(name: str, picture: Markup, note: str) -> str:
    """Returns an HTML figure: a picture with its legend, below its finding and a note. name: id of the element, unique
    on the page.  note: HTML."""
    caption = f"<h3>{markup(picture.finding)}</h3><figcaption>{note}</figcaption>"
    return f'<figure id="{name}">{caption}{picture.body}{picture.legend}</figure>'


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns an HTML table with all texts escaped; columns of numbers are aligned right. A cell that is a `Link` leads
    to its address. A narrow page scrolls a table of more than two columns."""

    def is_number(value: object) -> bool:
        """Returns True if the value is an int or a float; False for a bool."""
        return isinstance(value, int | float) and not isinstance(value, bool)

    def as_text(value: object) -> str:
        """Returns the value as escaped text: a float with three significant digits, an int with commas between
        thousands."""
        if isinstance(value, Link):
            return link(value)
        if not is_number(value):
            return markup(str(value))
        return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}"

    columns_of_numbers = [
        any(map(is_number, values)) and all(is_number(value) or value in ("—", "never") for value in values)
        for values in zip(*rows, strict=True)
    ]
    alignments = [' class="number"' if right else "" for right in columns_of_numbers] or [""] * len(columns)
    head = "".join(f"<th{side}>{markup(name)}</th>" for side, name in zip(alignments, columns, strict=True))
    lines = "".join(
        f"<tr>{''.join(f'<td{side}>{as_text(value)}</td>' for side, value in zip(alignments, row, strict=True))}</tr>"
        for row in rows
    )
    wide = ' class="wide"' if len(columns) > 2 else ""
    return f'<div class="scroll"><table{wide}><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
