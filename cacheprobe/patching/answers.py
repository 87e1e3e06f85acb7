"""Converts the answers that a user gives, as text or as token ids, to token ids of a model, and scores them."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeAlias, cast

import pandas as pd
import torch

from cacheprobe.core.records import Request
from cacheprobe.core.tokens.answers import tokens_after
from cacheprobe.core.values import listed, whole_number
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.models.prompts import Prompt, as_list, as_token_ids
from cacheprobe.models.turns import hold_model

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


@torch.inference_mode()
def answer_logprobs(model: CachedLM, prompts: object, answers: "Sequence[Answer] | None" = None) -> pd.DataFrame:
    """Returns a DataFrame with one line for each prompt and answer: the log-probability of the whole answer, the sum
    over its tokens.

    prompts: one prompt or several, as for `cp.run`.  answers: of every prompt, each as text that follows the prompt
    directly, a token id, or the ids of several tokens; by default the possible answers of each task example.
    Columns: prompt (its index), answer (text), token_ids, logprob_nats, share (the answer's probability among the given
    ones), is_right (whether it is the example's right answer; null without an example).
    Raises: ValueError for an answer that the tokenizer joins to the prompt or does not know all of, for a prompt
    without answers, and for text beyond the model's context.
    """
    lines = []
    with hold_model(model):
        for number, item in enumerate(as_list(prompts)):
            prompt, example = (item.prompt, item.example) if isinstance(item, Request) else (item, item)
            given = getattr(example, "answers", ()) if answers is None else answers
            if isinstance(given, str) or not len(given):
                raise ValueError(f"prompt {number}: give answers, a list of texts or token ids, got {given!r}")
            ids = as_token_ids(model, cast("Prompt", prompt), f"number {number}")
            found = [as_answer(model, answer, ids) for answer in given]
            require_room(model, ids, found)
            nats = [_logprob(model, ids, tokens) for tokens in found]
            right = getattr(example, "answer", None)
            lines += [
                {
                    "prompt": number,
                    "answer": answer if isinstance(answer, str) else model.decode(tokens),
                    "token_ids": list(tokens),
                    "logprob_nats": logprob,
                    "share": share,
                    "is_right": None if right is None else answer == right,
                }
                for answer, tokens, logprob, share in zip(
                    given, found, nats, torch.tensor(nats).double().softmax(0).tolist(), strict=True
                )
            ]
    return pd.DataFrame(lines).astype({"is_right": "boolean"})


def _logprob(model: CachedLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Returns the log-probability in nats of the tokens of an answer, after a prompt."""
    fed = [*prompt, *answer[:-1]]
    slots = list(range(len(prompt) - 1, len(fed)))
    logits = feed(model, torch.tensor([fed]), logit_slots=slots).out[0].double()
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(answer, device=logits.device)[:, None]).sum())


def require_room(model: CachedLM, prompt: Sequence[int], answers: Iterable[Sequence[int]]) -> None:
    """Raises: ValueError if the prompt and an answer are longer than the model's context."""
    if (length := len(prompt) + max(map(len, answers)) - 1) > model.n_ctx:
        raise ValueError(f"prompt and answer have {length} tokens, the model's context is {model.n_ctx}; shorten them")
