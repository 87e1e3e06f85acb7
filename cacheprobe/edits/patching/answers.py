"""Converts the answers that a user gives, as text or as token ids, to token ids of a model."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeAlias

from cacheprobe.core.tokens import tokens_after
from cacheprobe.core.values import listed, whole_number
from cacheprobe.models.base import CachedLM

Answer: TypeAlias = str | int | Sequence[int]
"""An answer as the user gives it: text, a token id, or the ids of several tokens."""


def as_answer(model: CachedLM, answer: Answer, prompt: Sequence[int]) -> tuple[int, ...]:
    """Returns the token ids of an answer, one or several. Text is taken as it follows the prompt directly, with its
    leading space if it has one.

    prompt: the token ids before the answer.
    Raises: ValueError for text as the function of `tokens_after`, for anything else that is no token id, and for an id
    outside the vocabulary.
    """
    if isinstance(answer, str):
        return tokens_after(model.decode(prompt), partial(model.encode, add_special_tokens=False), model.decode)(answer)
    ids = tuple(whole_number("answer: a token id", one) for one in listed(answer))
    if not ids:
        raise ValueError("answer: there is no token id; give text, a token id, or several")
    if bad := [one for one in ids if not 0 <= one < model.d_vocab]:
        raise ValueError(f"answer: token id {bad[0]} is outside the vocabulary of {model.d_vocab}")
    return ids


def one_token(model: CachedLM, answer: Answer, prompt: Sequence[int]) -> int:
    """Returns the token id of an answer of one token, where a number belongs to one. Arguments and errors: as in
    `as_answer`; ValueError for several tokens, too."""
    ids = as_answer(model, answer, prompt)
    if len(ids) != 1:
        raise ValueError(
            f"{answer!r} is {len(ids)} tokens, {model.token_texts(ids)}, and one is needed here; give one of the ids "
            f"{list(ids)}. cp.analysis.answer_logprobs and cp.patching score whole answers"
        )
    return ids[0]


def require_room(model: CachedLM, prompt: Sequence[int], answers: Iterable[Sequence[int]]) -> None:
    """Raises: ValueError if the prompt and an answer are longer than the model's context."""
    if (length := len(prompt) + max(map(len, answers)) - 1) > model.n_ctx:
        raise ValueError(f"prompt and answer have {length} tokens, the model's context is {model.n_ctx}; shorten them")
