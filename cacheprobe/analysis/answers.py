"""Scores whole answers, of any number of tokens, by their log-probability directly after a prompt."""

from collections.abc import Sequence

import pandas as pd
import torch

from cacheprobe.analysis.gradients.texts import texts_of_prompts
from cacheprobe.models.answers import Answer, as_answer
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.models.turns import hold_model


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
    Twin: tests.reported.test_answers: a whole uncached forward of transformers, close(1e-4) in float32.
    """
    lines = []
    with hold_model(model):
        for text in texts_of_prompts(model, prompts):
            given = getattr(text.example, "answers", ()) if answers is None else answers
            if isinstance(given, str) or not len(given):
                raise ValueError(f"prompt {text.request_id}: give answers, a list of texts or token ids, got {given!r}")
            found = [as_answer(model, answer, text.token_ids) for answer in given]
            nats = [_logprob(model, text.token_ids, ids) for ids in found]
            shares = torch.tensor(nats, dtype=torch.float64).softmax(0).tolist()
            right = getattr(text.example, "answer", None)
            lines += [
                {
                    "prompt": text.request_id,
                    "answer": answer if isinstance(answer, str) else model.decode(ids),
                    "token_ids": list(ids),
                    "logprob_nats": logprob,
                    "share": share,
                    "is_right": None if right is None else answer == right,
                }
                for answer, ids, logprob, share in zip(given, found, nats, shares, strict=True)
            ]
    return pd.DataFrame(lines).astype({"is_right": "boolean"})


def _logprob(model: CachedLM, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Returns the log-probability in nats of the tokens of an answer, after a prompt. Raises: ValueError if they exceed
    the model's context."""
    fed = [*prompt, *answer[:-1]]
    if len(fed) > model.n_ctx:
        raise ValueError(
            f"prompt and answer have {len(fed)} tokens, the model's context is {model.n_ctx}; shorten them"
        )
    slots = list(range(len(prompt) - 1, len(fed)))
    logits = feed(model, torch.tensor([fed]), logit_slots=slots).out[0].double()
    return float(logits.log_softmax(-1).gather(-1, torch.tensor(answer, device=logits.device)[:, None]).sum())
