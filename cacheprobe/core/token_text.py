"""Turns token texts into visible text, in which white space shows as signs, and finds the newest tokens of a long text
that can be decoded alone."""

from collections.abc import Callable, Sequence
from functools import lru_cache

_SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}


def visible(text: str) -> str:
    """Returns the text with spaces, line ends and tabs as signs, such as ␣A and ⏎, and other unprintable characters as
    <U+hex>.

    An empty text becomes ∅. A text that is already visible does not change.
    """
    if not text:
        return "∅"
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else f"<U+{ord(c):04X}>") for c in text)


CUT = "\ufffd"
"""Replacement character that a tokenizer returns for an incomplete UTF-8 sequence."""
WINDOW = 64
"""Least number of newest tokens that are decoded again when new tokens come, and half of the largest number."""
_MOST_WINDOWS, _MOST_TOKENS_OF_A_CHARACTER = 8, 4
"""Number of windows that are tried, newest first, before all tokens are decoded; and of beginnings of each window."""


class TextWindow:
    """Finds where the newest tokens of a growing text begin that can be decoded alone, so that a long text takes no
    longer per token than a short one.

    A window begins at a multiple of its length, or up to three tokens before it, where a character begins. It is used
    if its own tokens, decoded alone, are the end of what they are after the tokens before it: then no character, and no
    words that the tokenizer joins, begin before the window and end in it.
    Twin: the decode of all tokens, which ends with that of the window, ==.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], num_chars: int = 1, num_tokens: int = 0) -> None:
        self._decode, self._num_chars, self._num_tokens = decode, num_chars, max(num_tokens, WINDOW)
        self._is_separate = lru_cache(maxsize=128)(self._compare)

    def start(self, token_ids: Sequence[int]) -> int:
        """Returns the index of the first token to decode: at least `num_tokens` tokens with `num_chars` characters
        follow; 0 if no window can be decoded alone."""
        n = self._num_tokens
        newest = len(token_ids) // n * n - n
        for bound in range(newest, max(newest - _MOST_WINDOWS * n, 0), -n):
            for first in range(bound, max(bound - _MOST_TOKENS_OF_A_CHARACTER, 0), -1):
                if self._is_separate(tuple(token_ids[max(first - n, 0) : first]), tuple(token_ids[first : first + n])):
                    return first
        return 0

    def _compare(self, before: tuple[int, ...], own: tuple[int, ...]) -> bool:
        """Returns whether the tokens `own` have enough characters and decode to the same text alone and after
        `before`."""
        alone = self._decode(list(own))
        if len(alone.rstrip(CUT)) < self._num_chars or alone.startswith(CUT):
            return False
        return self._decode([*before, *own]).endswith(alone)
