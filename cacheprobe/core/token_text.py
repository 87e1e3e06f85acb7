"""The one visible form of a token, used in tables, pictures and on the command line."""

_SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}


def visible(text: str) -> str:
    """The text with its white space as signs, such as ␣A and ⏎; what cannot be printed (controls, bidi marks) as U+hex.

    An empty text is ∅. The visible form of a visible form is itself.
    """
    if not text:
        return "∅"
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else f"<U+{ord(c):04X}>") for c in text)
