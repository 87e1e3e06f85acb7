"""Texts of tokens: gives each token of a vocabulary a text of its own, shows white space as signs, finds the newest
tokens of a long text that can be decoded alone, special tokens, and the tokens of an answer after a prompt.
"""

import codecs
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

from cacheprobe.core.live import LiveModule, LiveTokenizer, without_collection

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
    text = text.replace(" ", _SIGNS[" "])  # most tokens have no other sign
    if text.isprintable():
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


@without_collection()
def texts_of_backend(backend: LiveTokenizer, size: int) -> list[str]:
    """Returns `distinct_texts` of the token ids below `size`. backend: a Tokenizer of the library tokenizers."""
    names = [backend.id_to_token(i) for i in range(size)]
    return distinct_texts(names, backend.decode_batch([[i] for i in range(size)], skip_special_tokens=False))


def _own_text(token_id: int, name: str | None, text: str) -> str:
    """Returns the text of one token of a vocabulary, which another token may share."""
    if name is None:
        return f"<{token_id}>"
    if CUT in text:
        if all(character in BYTES for character in name):
            text = bytes(BYTES[character] for character in name).decode(errors="cacheprobe-hex")
            return text.replace(CUT, "<0xEF><0xBF><0xBD>")  # a token that is this sign itself
        return name
    return f" {text}" if name.startswith("▁") and not text.startswith(" ") else text


def _byte_characters() -> dict[str, int]:
    """Returns the byte that each character stands for in a byte-level vocabulary. Source: GPT-2, bytes_to_unicode."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _byte_characters()
"""The byte that each character stands for in a byte-level vocabulary, such as 32, a space, for Ġ."""


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


# -- special tokens: dictionaries leave out their states unless include_special is set. The state of the first token, to
# which much attention goes, is hundreds of times as long as others in many models. It would decide what a dictionary
# learns, and the share of variance that it explains.


def special_token_ids(model: LiveModule) -> tuple[int, ...]:
    """Returns the ids that a model's tokenizer calls special, such as the end of a turn, sorted; () without one."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return ()
    named = tuple(map(int, getattr(tokenizer, "all_special_ids", ())))
    state = (named, len(tokenizer) if hasattr(tokenizer, "__len__") else 0)
    known = _SPECIAL.get(tokenizer)
    if known is None or known[0] != state:  # to list 6,000 added tokens takes a tenth of a second
        added: Mapping[int, object] = getattr(tokenizer, "added_tokens_decoder", {})
        marked = {token_id for token_id, token in added.items() if getattr(token, "special", False)}
        known = _SPECIAL[tokenizer] = state, tuple(sorted({*marked, *named}))
    return known[1]


_SPECIAL: "WeakKeyDictionary[LiveTokenizer, tuple[object, tuple[int, ...]]]" = WeakKeyDictionary()
"""By tokenizer: (its named special ids and its length, all its special ids)."""


def is_special(position: int, token_id: int, special: Container[int]) -> bool:
    """Returns whether a token is the first of its text, or has one of the ids `special`."""
    return position == 0 or token_id in special


# -- answers

Encode = Callable[[str], Sequence[int]]
"""Function from a text to its token ids, without those that a tokenizer adds to every text."""
Decode = Callable[[Sequence[int]], str]


def tokens_after(prompt: str, encode: Encode, decode: Decode) -> Callable[[str], tuple[int, ...]]:
    """Returns a function from the text of an answer to its token ids, as the tokenizer writes it directly after the
    prompt. So " heads" is the token ▁heads of a SentencePiece tokenizer, which encodes " heads" alone as two. A word
    that would be glued to the prompt's last word, such as "heads" after "The coin is", is encoded alone.

    The function raises ValueError for an answer without a token, one whose first characters share a token with the end
    of the prompt, and one with text that is unknown to the tokenizer, which would be scored as <unk> or left out.
    """
    before = tuple(encode(prompt))

    def fault(answer: str) -> tuple[tuple[int, ...], str]:
        """Returns (the answer's token ids, why they cannot be scored; "" if they can)."""
        is_glued = _is_cased(prompt[-1:]) and _is_cased(answer[:1])
        whole = (*before, *encode(answer)) if is_glued else tuple(encode(prompt + answer))
        ids = whole[len(before) :]
        if whole[: len(before)] != before or (not ids and answer.strip()):
            return ids, f"the tokenizer joins {answer!r} to the prompt's last token"
        if not ids:
            return ids, f"{answer!r} has no token"
        if _letters(decode(ids)) != _letters(answer):
            return ids, f"the tokenizer does not know all of {answer!r}, whose tokens read {decode(ids)!r}"
        return ids, ""

    def ids_of(answer: str) -> tuple[int, ...]:
        """Returns the token ids of an answer. Raises: ValueError, see `tokens_after`."""
        ids, why = fault(answer)
        if not why:
            return ids
        other = answer.lstrip() if answer[:1].isspace() else f" {answer}"
        is_remedy = bool(answer.strip()) and not fault(other)[1]
        remedy = f"write {other!r}" if is_remedy else "use other words, or give token ids"
        raise ValueError(f"answer after {prompt[-20:]!r}: {why}; {remedy}")

    return ids_of


def _is_cased(sign: str) -> bool:
    """Returns whether a sign is a letter of a script that parts words by spaces: one with capital letters."""
    return sign.lower() != sign.upper()


def _letters(text: str) -> str:
    """Returns a text without what a tokenizer may change in it: white space and its signs, case, and accents."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return "".join(sign for sign in plain if not (sign.isspace() or sign in "▁Ġ" or unicodedata.combining(sign)))
