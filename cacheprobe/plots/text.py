"""Token texts for pictures. They are user data: made visible, cut to fit, and escaped before they meet any markup."""

import unicodedata
from collections.abc import Mapping
from html import escape

import pandas as pd

from cacheprobe.core.token_text import visible

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def plain(text: str) -> str:
    """For a terminal: on one line, its spaces as they are, and nothing in it that a terminal would act on."""
    return visible(text).replace("␣", " ")


def columns_of(text: str) -> int:
    """Width of a text in columns of a monospaced font."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shorten(text: str, width: int) -> str:
    """The text in at most `width` columns, with an ellipsis where something was cut."""
    if columns_of(text) <= width:
        return text
    kept = ""
    for c in text:
        if columns_of(kept + c) > width - 1:
            break
        kept += c
    return kept + "…"


def token_label(text: str, width: int) -> str:
    """A token for a picture: visible, cut to fit; not yet escaped."""
    return shorten(visible(text), width)


def markup(text: str) -> str:
    """Escaped for HTML, SVG and plotly's own pseudo-HTML, which would otherwise act on <b> or drop <|im_start|>."""
    return escape(str(text), quote=True)


def subscript(number: int) -> str:
    return str(number).translate(_SUBSCRIPTS)


def token_texts(rows: pd.DataFrame, hypotheses: pd.DataFrame | None = None) -> dict[int, str]:
    """Token id -> text, of every token that the tables of a trace name."""
    pairs = [rows[["token_id", "token"]]]
    if hypotheses is not None:
        committed = hypotheses[["committed_token_id", "committed_token"]].dropna()
        pairs += [hypotheses[["token_id", "token"]], committed.set_axis(["token_id", "token"], axis=1)]
    table = pd.concat([pair.astype({"token_id": "int64", "token": object}) for pair in pairs])
    table = table.drop_duplicates("token_id")
    return dict(zip(table.token_id.tolist(), table.token.tolist(), strict=True))


def text_of(texts: Mapping[int, str], token_id: int) -> str:
    """A token's text; its id in brackets where no table names it."""
    return texts.get(token_id, f"<{token_id}>")
