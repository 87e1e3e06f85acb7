"""Gives each token of a vocabulary a text of its own, shows white space as signs, and finds the newest tokens of a long
text that can be decoded alone."""

import codecs
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_SIGNS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}
CUT = "\ufffd"
"""Replacement character that a tokenizer returns for an incomplete UTF-8 sequence."""


def visible(text: str) -> str:
    """Returns the text with spaces, line ends and tabs as signs, such as ␣A and ⏎, and other unprintable characters as
    <U+hex>.

    An empty text becomes ∅. A text that is already visible does not change.
    """
    if not text:
        return "∅"
    if text.isprintable() and " " not in text:
        return text
    return "".join(_SIGNS.get(c) or (c if c.isprintable() else f"<U+{ord(c):04X}>") for c in text)


WINDOW = 64
"""Least number of newest tokens that are decoded again when new tokens come, and half of the largest number."""
_MOST_WINDOWS, _MOST_TOKENS_OF_A_CHARACTER = 8, 4
"""Number of windows that are tried, newest first, before all tokens are decoded; and of beginnings of each window."""


def distinct_texts(names: Sequence[str | None], decoded: Sequence[str]) -> list[str]:
    """Returns the text of each token id of a vocabulary as a list. No two texts are equal, nor equal as `visible` shows
    them.

    names: the vocabulary's string for each id, such as "Ġthe" or "▁the"; None for an id without a token, whose text is
    "<id>".  decoded: the text of each id, decoded alone.
    A token that is part of a character becomes its bytes, such as <0xE6>. A word that begins with "▁" keeps its space,
    which decoding alone takes away. Of tokens with one text, the one whose string is that text keeps it; another one
    shows its string, or its id behind the text.
    """
    texts = [_own_text(i, name, text) for i, (name, text) in enumerate(zip(names, decoded, strict=True))]
    shown = [visible(text) for text in texts]
    counts = Counter(shown)
    shared = [i for i, text in enumerate(shown) if counts[text] > 1]
    taken = {text for text, count in counts.items() if count == 1}
    shared.sort(key=lambda i: (names[i] or "").replace("▁", " ") != texts[i])  # a stable sort: then by id
    for i in shared:
        choices = (texts[i], names[i] or texts[i], f"{texts[i]}<{i}>")
        texts[i] = next((text for text in choices if visible(text) not in taken), f"<{i}>")
        taken.add(visible(texts[i]))
    return texts


def texts_of_backend(backend: Any, size: int) -> list[str]:
    """Returns `distinct_texts` of the token ids below `size`. backend: a Tokenizer of the library tokenizers."""
    names = [backend.id_to_token(i) for i in range(size)]
    return distinct_texts(names, backend.decode_batch([[i] for i in range(size)], skip_special_tokens=False))


def _own_text(token_id: int, name: str | None, text: str) -> str:
    """Returns the text of one token of a vocabulary, which another token may share."""
    if name is None:
        return f"<{token_id}>"
    if CUT in text:
        if all(character in _BYTES for character in name):
            text = bytes(_BYTES[character] for character in name).decode(errors="cacheprobe-hex")
            return text.replace(CUT, "<0xEF><0xBF><0xBD>")  # a token that is this sign itself
        return name
    return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


def _byte_characters() -> dict[str, int]:
    """Returns the byte that each character stands for in a byte-level vocabulary. Source: GPT-2, bytes_to_unicode."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


def _as_hex(error: UnicodeError) -> tuple[str, int]:
    """Returns the bytes that are no whole character as text such as <0xE6><0x9D>, for Python's decoder."""
    assert isinstance(error, UnicodeDecodeError)
    return "".join(f"<0x{byte:02X}>" for byte in error.object[error.start : error.end]), error.end


codecs.register_error("cacheprobe-hex", _as_hex)


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
