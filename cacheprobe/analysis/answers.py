"""Scores whole answers, of one token or several, by their log-probability after a prompt."""

from collections.abc import Sequence
from typing import cast

import pandas as pd
import torch

from cacheprobe.core.records import Request
from cacheprobe.edits.patching.answers import Answer, as_answer, require_room
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.models.prompts import Prompt, as_list, as_token_ids, require_unpadded
from cacheprobe.models.turns import hold_model
from cacheprobe.trace.tables.schema import typed


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
    lines, listed = [], as_list(prompts)
    given_prompts = [item.prompt if isinstance(item, Request) else item for item in listed]
    read = [as_token_ids(model, cast("Prompt", prompt), f"number {n}") for n, prompt in enumerate(given_prompts)]
    require_unpadded(listed, model.tokenizer)
    with hold_model(model):
        for number, (item, ids) in enumerate(zip(listed, read, strict=True)):
            example = item.example if isinstance(item, Request) else item
            given = getattr(example, "answers", ()) if answers is None else answers
            if isinstance(given, str) or not len(given):
                raise ValueError(f"prompt {number}: give answers, a list of texts or token ids, got {given!r}")
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
    return typed(pd.DataFrame(lines), "answer_logprobs")


def _logprob(model: CachedLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Returns the log-probability in nats of the tokens of an answer, after a prompt."""
    fed = [*prompt, *answer[:-1]]
    slots = list(range(len(prompt) - 1, len(fed)))
    logits = feed(model, torch.tensor([fed]), logit_slots=slots).out[0].double()
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(answer, device=logits.device)[:, None]).sum())
