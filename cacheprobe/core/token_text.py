"""Turns token texts into visible text, in which white space shows as signs, for tables, pictures and the command
line."""

_SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}


def visible(text: str) -> str:
    """Returns the text with spaces, line ends and tabs as signs, such as ␣A and ⏎, and other unprintable characters as
    <U+hex>.

    An empty text becomes ∅. A text that is already visible does not change.
    """
    if not text:
        return "∅"
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else f"<U+{ord(c):04X}>") for c in text)
