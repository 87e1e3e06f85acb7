"""Prepares token texts for pictures: makes white space visible, cuts to a width, and escapes for HTML and SVG.

Texts come from users: callers pass each through `markup` before it becomes part of HTML or SVG.
"""

import unicodedata
from collections.abc import Mapping
from html import escape
from itertools import accumulate

import pandas as pd

from cacheprobe.core.tokens import visible
from cacheprobe.trace.tables.token_history import token_texts_of

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def plain(text: str) -> str:
    """Returns the text on one line for a terminal: spaces stay, and control characters become visible signs."""
    return visible(text).replace("␣", " ")


def columns_of(text: str) -> int:
    """Returns the width of a text in columns of a monospaced font: 2 for a wide East Asian letter, 0 for a combining
    mark, 1 for others."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten(text: str, width: int) -> str:
    """Returns the text, cut to at most `width` columns of a monospaced font; a cut text ends with an ellipsis."""
    if columns_of(text) <= width:
        return text
    num_kept = sum(columns < width for columns in accumulate(map(columns_of, text)))
    return text[:num_kept] + "…"


def token_label(text: str, width: int) -> str:
    """Returns a token's text for a picture: white space made visible, cut to `width` columns, not escaped."""
    return shorten(visible(text), width)


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 token", "2 tokens" or "3 passes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{plural * (count != 1)}"


def stretch(noun: str, first: object, last: object) -> str:
    """Returns text such as "slot 3" or "slots 3 to 7"; both ends count."""
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def runs_of(numbers: list[int]) -> list[tuple[int, int]]:
    """Returns a list of (first, last), one for each unbroken run of whole numbers in a sorted list: [1, 2, 3, 7] gives
    [(1, 3), (7, 7)]."""
    known = set(numbers)
    starts = [n for n in numbers if n - 1 not in known]
    return list(zip(starts, [n for n in numbers if n + 1 not in known], strict=True))


def markup(text: str) -> str:
    """Returns the text escaped for HTML, SVG and plotly, so that <b> or <|im_start|> is shown and not read as a tag."""
    return escape(str(text), quote=True)


def subscript(number: int) -> str:
    """Returns the number as text in subscript digits: 12 gives "₁₂"."""
    return str(number).translate(_SUBSCRIPTS)


def token_texts(rows: pd.DataFrame, hypotheses: pd.DataFrame | None = None) -> dict[int, str]:
    """Returns a dict from token id to text. The tokens are the input tokens in the rows table of a trace, and the first
    choices and committed tokens in the hypotheses table (None: none)."""
    table = token_texts_of(rows, hypotheses)
    return dict(zip(table.token_id.tolist(), table.token.tolist(), strict=True))


def text_of(texts: Mapping[int, str], token_id: int) -> str:
    """Returns the text of a token by its id; "<id>" with the number if `texts` lacks the id."""
    return texts.get(token_id, f"<{token_id}>")
