"""Converts between text and token ids with a model's tokenizer."""

from collections.abc import Sequence
from itertools import groupby

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.tokens import CUT, distinct_texts, texts_of_backend
from cacheprobe.models.base import ModelError

_TAIL = 4
"""Number of earlier tokens that a decoded text may depend on: a character has at most four bytes."""


class TokenText:
    """Converts between text and token ids for a model, with the tokenizer as its owner configured it. Without a
    tokenizer, token 17 becomes "<17>", and text cannot be encoded."""

    name: str
    tokenizer: LiveTokenizer
    d_vocab: int
    prepend_bos = False
    """Whether `encode` puts the tokenizer's start token in front where the tokenizer itself does not."""
    _texts: tuple[int, list[str]] = (-1, [])
    """(number of tokens of the tokenizer, the text of each token id), computed at the first use."""

    @classmethod
    def of(cls, tokenizer: LiveTokenizer) -> "TokenText":
        """Returns the TokenText of a tokenizer, or of None, without a model."""
        text = TokenText()
        text.name, text.tokenizer, text.d_vocab = "the import", tokenizer, 0
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text as a tuple: those of the tokenizer, and a start token in front if the model
        was loaded with prepend_bos=True. Raises: ModelError if the model has no tokenizer."""
        tokenizer = self._required_tokenizer()
        ids = tuple(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
        if self.prepend_bos and add_special_tokens and ids[:1] != (tokenizer.bos_token_id,):
            return (tokenizer.bos_token_id, *ids)
        return ids

    def _required_tokenizer(self) -> LiveTokenizer:
        if self.tokenizer is None:
            raise ModelError(f"{self.name} has no tokenizer, so prompts must be lists of token ids, not text")
        return self.tokenizer

    def decode(self, token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Returns the text of a sequence of token ids; an id without a token, or any without a tokenizer, is "<id>".

        after: earlier tokens, whose text is left out. Some tokenizers begin a text without the space of its first word,
        so the text of tokens that follow others may begin with a space.
        """
        if self.tokenizer is None:
            return " ".join(self.token_texts(token_ids))
        before = list(after[-_TAIL:])
        whole, known = self._decoded([*before, *token_ids]), self._decoded(before)
        known = known if whole.startswith(known) else known.rstrip(CUT)
        return whole[len(known) :] if whole.startswith(known) else self._decoded(token_ids)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        """Returns the joint text of token ids. The tokenizer decodes each stretch of ids that it has tokens for."""
        texts = self._all_texts()
        stretches = groupby(token_ids, key=lambda i: not 0 <= i < len(texts) or texts[i] == f"<{i}>")
        return "".join(
            "".join(f"<{i}>" for i in ids)
            if is_unknown
            else self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
            for is_unknown, ids in stretches
        )

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns a list with the text of each token id; "<17>" for id 17 without a token. No two ids have one text: a
        token that is part of a character is shown as its bytes, such as <0xE6>."""
        texts = self._all_texts()
        return [texts[i] if 0 <= i < len(texts) else f"<{i}>" for i in token_ids]

    def _all_texts(self) -> list[str]:
        """Returns the text of every token id; [] without a tokenizer. Computes the list again if tokens were added."""
        if self.tokenizer is None:
            return []
        if self._texts[0] != len(self.tokenizer):
            self._texts = len(self.tokenizer), _texts_of(self.tokenizer, max(self.d_vocab, len(self.tokenizer)))
        return self._texts[1]


def _texts_of(tokenizer: LiveTokenizer, size: int) -> list[str]:
    """Returns the texts of the token ids below `size`, each different from the others."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return texts_of_backend(backend, size)
    named = {i: name for name, i in tokenizer.get_vocab().items()}
    decoded = [tokenizer.decode([i], clean_up_tokenization_spaces=False) if i in named else "" for i in range(size)]
    return distinct_texts([named.get(i) for i in range(size)], decoded)
