"""Turns token texts into their visible form, for tables, pictures and the command line."""

_SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}


def visible(text: str) -> str:
    """Returns the text with white space as signs, such as ␣A and ⏎, and unprintable characters as <U+hex>.

    An empty text is ∅. A text in visible form does not change.
    """
    if not text:
        return "∅"
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else f"<U+{ord(c):04X}>") for c in text)
