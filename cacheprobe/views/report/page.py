"""Builds an HTML page that needs no other file: styles, plotly.js, and figures that follow the page's width and colour
scheme."""

import json
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from cacheprobe.views.diagrams import svg
from cacheprobe.views.diagrams.frame import Markup
from cacheprobe.views.style import FIGURE_CONFIG, PAGE_CSS, PICTURE_CSS, layout_template
from cacheprobe.views.text import markup

# The page needs no other file, so the policy forbids the browser to fetch any.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)

_THEME_SCRIPT = """
(function () {
  const templates = TEMPLATES;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = () => document.querySelectorAll(".js-plotly-plot").forEach(
    figure => Plotly.relayout(figure, {template: templates[dark.matches ? "dark" : "light"]}));
  dark.addEventListener("change", paint);
  if (dark.matches) paint();
  // a figure that was drawn while its place was still growing has the wrong width
  document.querySelectorAll(".js-plotly-plot").forEach(figure => Plotly.Plots.resize(figure));
  // browsers show the <title> of an SVG part below a resting mouse; touch screens have no such mouse, so a tap shows it
  const tip = document.getElementById("tip");
  document.addEventListener("pointerup", ({target, clientX, clientY}) => {
    const part = target.closest("svg :has(> title)");
    tip.hidden = !part;
    tip.textContent = part ? part.querySelector(":scope > title").textContent : "";
    tip.style.left = Math.max(Math.min(clientX + 12, innerWidth - tip.offsetWidth - 4), 4) + "px";
    tip.style.top = Math.max(Math.min(clientY + 12, innerHeight - tip.offsetHeight - 4), 4) + "px";
  });
  addEventListener("scroll", () => { tip.hidden = true; }, true);
})();
"""


def page(title: str, body: str) -> str:
    """Returns a whole HTML document as text, with the styles of diagrams and reports, and plotly.js. title: plain text.
    body: HTML."""
    templates = json.dumps({name: layout_template(dark=name == "dark").to_plotly_json() for name in ("light", "dark")})
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{markup(title)}</title><style>{PICTURE_CSS}{PAGE_CSS}</style>"
        f'<script>{get_plotlyjs()}</script></head>\n<body class="cp">{svg.TEXTURES}<main>{body}</main>\n'
        f"<div id='tip' hidden></div><script>{_THEME_SCRIPT.replace('TEMPLATES', templates)}</script></body></html>\n"
    )


def with_contents(head: str, sections: Sequence[str]) -> str:
    """Returns HTML: `head`, a list of links to the sections by their headings, and the sections. Each begins with an
    <h2>, which gets an id."""
    links, bodies = [], []
    for number, section in enumerate(sections, start=1):
        title = section[len("<h2>") : section.index("</h2>")]
        links.append(f'<li><a href="#section-{number}">{title}</a></li>')
        bodies.append(section.replace("<h2>", f'<h2 id="section-{number}">', 1))
    return f'{head}<nav class="contents" aria-label="Contents"><ol>{"".join(links)}</ol></nav>' + "\n".join(bodies)


def block(name: str, picture: Markup, note: str) -> str:
    """Returns an HTML figure: a picture with its legend, below its finding and a note. name: id of the element, unique
    on the page.  note: HTML."""
    caption = f"<h3>{markup(picture.finding)}</h3><figcaption>{note}</figcaption>"
    return f'<figure id="{name}">{caption}{picture.body}{picture.legend}</figure>'


def figure_block(figure: go.Figure, name: str, note: str) -> str:
    """Returns a plotly figure as HTML, below its own title as a heading, which can wrap, and a note. The page must
    contain plotly.js.

    name: id of the figure's element, unique on the page.  note: HTML.
    """
    heading = figure.layout.title.text
    untitled = go.Figure(figure).update_layout(title=None)
    top = untitled.layout.margin.t or 0
    # without its title the figure needs 40 px less at the top, where at least 28 px stay
    untitled.update_layout(
        margin_t=max(top - 40, 28), height=(untitled.layout.height or 400) - min(40, max(top - 28, 0))
    )
    html = untitled.to_html(
        full_html=False, include_plotlyjs=False, config=FIGURE_CONFIG, div_id=name, default_width="100%"
    )
    return f'<figure><h3>{heading}</h3><figcaption>{note}</figcaption><div class="scroll">{html}</div></figure>'


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns an HTML table with all texts escaped; columns of numbers are aligned right. A narrow page scrolls a table
    of more than two columns."""

    def is_number(value: object) -> bool:
        """Returns True if the value is an int or a float; False for a bool."""
        return isinstance(value, int | float) and not isinstance(value, bool)

    def as_text(value: object) -> str:
        """Returns the value as escaped text: a float with three significant digits, an int with commas between
        thousands."""
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
