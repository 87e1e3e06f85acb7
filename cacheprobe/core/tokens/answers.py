"""Finds the tokens of an answer: those that the tokenizer gives its text directly after the prompt."""

import unicodedata
from collections.abc import Callable, Sequence

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
