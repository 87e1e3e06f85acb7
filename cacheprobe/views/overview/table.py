"""Draws lines of the table of all tokens."""

from collections.abc import Callable

import pandas as pd

from cacheprobe.core.values import TableLine
from cacheprobe.views.overview.figures import Links
from cacheprobe.views.overview.selection import COLUMNS
from cacheprobe.views.text import markup, shorten, visible

SIGNS = {"accepted": "✓", "rejected": "✗", "recovered": "↷", "bonus": "+", "committed": "·"}
"""Sign of each verdict, so that it is told apart without colour."""
NUMBERS = frozenset(COLUMNS) - {"verdict", "drafted", "committed"}
"""Keys of the columns that are aligned right."""
EXPLAINED = (
    "A line is a committed token, or a rejected draft token; equal rejections share a line. Recovered: the verifier’s "
    "token in place of a rejected one. Bonus: its token after a wholly accepted draft. Committed: never drafted. First "
    "at layer: the lowest layer whose first choice is the committed token. Disagreement: the largest probability that "
    "a layer gave to another first choice than the last layer’s. Margin: how much more log-probability the last layer "
    "gives the committed token than the most likely other one. “—”: not known."
)
"""Text that explains the columns."""
_WIDTH = 20
"""Largest width of a token, in columns of a monospaced font."""


def cells_of(line: TableLine) -> dict[str, str]:
    """Returns the cells of one line of a token table by the keys of COLUMNS, as plain text; "—" for null."""

    def known(value: object, form: str = "") -> str:
        """Returns a value in a format; "—" for null."""
        return "—" if pd.isna(value) else format(value, form).replace("-0.00", "0.00")

    def token(text: object) -> str:
        """Returns a token's text, cut to a width; "—" for null."""
        return shorten(visible(text), _WIDTH) if isinstance(text, str) else "—"

    disagreement = known(line.disagreement, ".0%")
    if isinstance(line.disagreement_token, str):
        disagreement += f" {token(line.disagreement_token)} L{line.disagreement_layer}"
    drafter = "—" if pd.isna(line.first_at_drafter_layer) else "yes" if line.first_at_drafter_layer else "no"
    if drafter != "—" and not pd.isna(line.drafter_layer):
        drafter += f" L{line.drafter_layer}"
    values = (
        f"{SIGNS[line.verdict]} {line.verdict}", f"{line.times:,}" if line.times > 1 else "",
        token(line.drafted_token), token(line.committed_token), str(line.request_id), str(line.step),
        str(line.position), known(line.prediction_depth), known(line.first_at_layer), drafter, disagreement,
        known(line.entropy_nats, ".2f"), known(line.margin_nats, ".2f"), known(line.logprob_nats, ".2f"),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def line_html(line: TableLine, wrap: Callable[[str], str] = lambda inside: inside) -> str:
    """Returns the <td> elements of one line of a token table. wrap: function that puts the HTML of the line's own token
    inside of an element that can be pressed."""
    own = "drafted" if line.verdict == "rejected" else "committed"
    parts = []
    for key, text in cells_of(line).items():
        inside = f"<span class='{line.verdict}'>{markup(text)}</span>" if key == own else markup(text)
        inside = wrap(inside) if key == own else inside
        classes = " ".join(filter(None, (key, "number" * (key in NUMBERS))))
        parts.append(f"<td class='{classes}' data-name='{markup(COLUMNS[key][0])}'>{inside}</td>")
    return "".join(parts)


def token_list(lines: pd.DataFrame, most: int, links: Links | None = None) -> str:
    """Returns HTML of the first lines of a token table, for a report, and how many they are of all.

    lines: in the order in which they are to be shown.  most: largest number of lines.  links: what a press on a token
    does.
    """
    press = (Links() if links is None else links).token
    heads = "".join(
        f"<th{' class=number' if key in NUMBERS else ''}>{markup(heading)}</th>"
        for key, (heading, _) in COLUMNS.items()
    )
    body = "".join(
        f"<tr>{line_html(line, lambda inside, at=line: press(at.request_id, at.step, at.position, inside))}</tr>"
        for line in lines.head(most).itertuples()
    )
    said = f"{min(most, len(lines)):,} of {len(lines):,} lines" if len(lines) > most else f"{len(lines):,} lines"
    return (
        f"<p class='note'>{said}. {EXPLAINED}</p><div class='scroll'><table class='wide token-list'>"
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )
