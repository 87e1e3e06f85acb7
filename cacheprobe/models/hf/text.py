"""Converts between text and token ids with a model's tokenizer."""

from collections.abc import Sequence
from functools import cached_property

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.models.base import ModelError


class TokenText:
    """Converts between text and token ids for a model. Without a tokenizer, token 17 becomes "<17>", and text cannot be
    encoded."""

    name: str
    tokenizer: LiveTokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Returns the token ids of a text as a tuple. Raises: ModelError if the model has no tokenizer."""
        return tuple(self._required_tokenizer()(text, add_special_tokens=add_special_tokens).input_ids)

    def _required_tokenizer(self) -> LiveTokenizer:
        if self.tokenizer is None:
            raise ModelError(f"{self.name} has no tokenizer, so prompts must be lists of token ids, not text")
        return self.tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a sequence of token ids; text such as "<17> <4>" if the model has no tokenizer."""
        if self.tokenizer is None:
            return " ".join(self.token_texts(token_ids))
        return self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Returns a list with the text of each token id, decoded alone; "<17>" for token 17 without a tokenizer."""
        if self.tokenizer is None:
            return [f"<{token_id}>" for token_id in token_ids]
        for t in set(token_ids) - self._texts.keys():
            self._texts[t] = self.tokenizer.decode([t], clean_up_tokenization_spaces=False)
        return [self._texts[t] for t in token_ids]

    @cached_property
    def _texts(self) -> dict[int, str]:
        """Dictionary token id -> decoded text; empty at first, `token_texts` fills it."""
        return {}
