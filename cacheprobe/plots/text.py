"""Prepares token texts for pictures: makes white space visible, cuts to fit, and escapes for markup.

Texts come from users, so every text is escaped before it becomes part of markup.
"""

import unicodedata
from collections.abc import Mapping
from html import escape

import pandas as pd

from cacheprobe.core.token_text import visible
from cacheprobe.trace.tables.token_history import token_texts_of

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def plain(text: str) -> str:
    """Returns the text on one line for a terminal: spaces stay, control characters become visible."""
    return visible(text).replace("␣", " ")


def columns_of(text: str) -> int:
    """Returns the width of a text in columns of a monospaced font."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten(text: str, width: int) -> str:
    """Returns the text in at most `width` columns, with an ellipsis if it was cut."""
    if columns_of(text) <= width:
        return text
    kept = ""
    for c in text:
        if columns_of(kept + c) > width - 1:
            break
        kept += c
    return kept + "…"


def token_label(text: str, width: int) -> str:
    """Returns a token for a picture: visible and cut to fit, not escaped."""
    return shorten(visible(text), width)


def markup(text: str) -> str:
    """Returns the text escaped for HTML, SVG and plotly, which would otherwise read <b> or <|im_start|> as a tag."""
    return escape(str(text), quote=True)


def subscript(number: int) -> str:
    """Returns the number in subscript digits."""
    return str(number).translate(_SUBSCRIPTS)


def token_texts(rows: pd.DataFrame, hypotheses: pd.DataFrame | None = None) -> dict[int, str]:
    """Returns token id -> text, for every token in the tables of a trace."""
    table = token_texts_of(rows, hypotheses)
    return dict(zip(table.token_id.tolist(), table.token.tolist(), strict=True))


def text_of(texts: Mapping[int, str], token_id: int) -> str:
    """Returns a token's text; "<id>" if no table names the token."""
    return texts.get(token_id, f"<{token_id}>")
