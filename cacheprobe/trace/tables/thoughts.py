"""Builds the table of a Thinking States model's thoughts, and their lines in the table of lens readings."""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from cacheprobe.core.records import Request, Thought
from cacheprobe.core.tokens import visible
from cacheprobe.models.base import CachedLM
from cacheprobe.tasks.base import Example
from cacheprobe.trace.tables.schema import token_text, typed

THOUGHT_LENS = "thinking block"


def thought_lines(thoughts: Sequence[Thought], requests: Sequence[Request], model: CachedLM) -> pd.DataFrame:
    """Returns a DataFrame with one line for each thought, with the columns of `thoughts_table` that are known as soon
    as the thought is written."""
    by_request = {request.request_id: request for request in requests}
    truth = {number: _true_states(by_request[number], model) for number in {t.request_id for t in thoughts}}
    records = []
    for thought in thoughts:
        logprobs = thought.first_logits.double().log_softmax(-1)
        states = truth[thought.request_id]
        true_state = states[thought.end] if thought.end < len(states) else None
        texts = model.token_texts(thought.token_ids)
        said = model.decode(thought.token_ids[: len(thought.token_ids) - thought.has_ended]).strip()
        records.append(
            {
                "request_id": thought.request_id,
                "step": thought.step,
                "phase": thought.phase,
                "chunk": thought.chunk,
                "start": thought.end + 1 - len(thought.state),
                "end": thought.end,
                "token_ids": thought.token_ids,
                "tokens": texts,
                "text": " ".join(texts),
                "has_ended": thought.has_ended,
                "said": said,
                "logprobs_nats": thought.logprobs,
                "first_token_id": thought.token_ids[0],
                "first_logprob_nats": float(logprobs[thought.token_ids[0]]),
                "entropy_nats": float(-(logprobs.exp() * logprobs.clamp(min=-1e6)).sum()),
                "true_state": true_state,
                "agrees": says_state(said, true_state, by_request[thought.request_id].example),
                "state_norm": float(thought.state.double().norm()),
            }
        )
    return typed(records, "thoughts of a part")


def thoughts_table(
    lines: pd.DataFrame, first_logits: Float[Tensor, "n v"], rows: pd.DataFrame, tokens: Mapping[int, Sequence[int]]
) -> pd.DataFrame:
    """Returns a DataFrame with one line for each thought that a Thinking States model wrote after a whole chunk of
    tokens.

    lines: from `thought_lines`.  first_logits: those from which each thought's first token was chosen.  rows: the rows
    table.
    A chunk that several passes computed has several lines.
    thought (its number, and its index among the chunk states), request_id, step, phase, role, status and row (those of
    the chunk's last token: a thought of a rolled-back token is rolled back), chunk, start, end (absolute positions of
    the chunk's first and last token), token_ids, tokens (their texts), text, has_ended (False: cut at the limit), said
    (its words without the end token, "" if it has none), logprobs_nats;
    first_token_id, first_logprob_nats, entropy_nats of the choice of its first token; committed_token_id, the first
    token that the request generated, whether right or wrong, with its rank and committed_logprob_nats in that choice;
    true_state: the task's state after the chunk, null for a prompt without a task;
    agrees: whether its last words are that state, or the task's own thought for it; null if either is missing;
    state_norm: Euclidean norm of all c x m numbers of the chunk state, which is added to the next chunk.
    """
    places = pd.MultiIndex.from_frame(lines[["request_id", "step", "end"]])
    about = rows.set_index(["request_id", "step", "position"])[["role", "status", "row"]].loc[places]
    answers = [next(iter(tokens[number]), None) for number in lines.request_id.tolist()]
    ranks, logprobs = [], []
    for logits, answer in zip(first_logits, answers, strict=True):
        ranks.append(None if answer is None else _rank(logits.double(), answer))
        logprobs.append(None if answer is None else float(logits.double().log_softmax(-1)[answer]))
    table = lines.assign(
        thought=range(len(lines)),
        **{name: about[name].to_numpy() for name in about},
        committed_token_id=pd.array(answers, dtype="Int64"),
        rank=pd.array(ranks, dtype="Int64"),
        committed_logprob_nats=logprobs,
    )
    return typed(table, "thoughts")


def thought_states(thoughts: Sequence[Thought]) -> Tensor:
    """Returns a copy of the chunk states [n, c, m] of n thoughts; each is added to the next chunk's c tokens."""
    return torch.stack([thought.state for thought in thoughts]).to("cpu", copy=True)


def first_logits(thoughts: Sequence[Thought]) -> Tensor:
    """Returns the logits [n, v] from which the first token of each of n thoughts was chosen."""
    return torch.stack([thought.first_logits for thought in thoughts]).cpu()


def as_hypotheses(thoughts: pd.DataFrame, layer: int, token_texts: Mapping[int, str]) -> pd.DataFrame:
    """Returns thoughts as lines of the table of lens readings, one DataFrame line for each thought.

    A thought counts as a reading at layer l_out (`layer`) and site "thought". The thought's first token is compared
    with the first token that the request generated (`committed_token_id`), whether that is the right answer or not. So
    `agrees` differs from `agrees` of the thoughts table, which says whether the thought ends in the task's true state.
    An empty thought consists of its end token alone, and its `agrees` is null.
    """
    is_empty = thoughts.token_ids.map(len) == 1
    agrees = pd.array(thoughts.first_token_id == thoughts.committed_token_id, dtype="boolean")
    agrees[(is_empty | thoughts.committed_token_id.isna()).to_numpy(dtype=bool)] = pd.NA
    return pd.DataFrame(
        {
            **{key: thoughts[key] for key in ("row", "request_id", "step", "phase", "role", "status")},
            "position": thoughts.end,
            "layer": layer,
            "site": "thought",
            "lens": THOUGHT_LENS,
            "token_id": thoughts.first_token_id,
            "token": thoughts.tokens.str[0].map(visible),
            "logprob_nats": thoughts.first_logprob_nats,
            "entropy_nats": thoughts.entropy_nats,
            "committed_token_id": thoughts.committed_token_id,
            "committed_token": [
                None if pd.isna(token) else token_text(token_texts, int(token)) for token in thoughts.committed_token_id
            ],
            "rank": thoughts["rank"],
            "committed_logprob_nats": thoughts.committed_logprob_nats,
            "agrees": agrees,
        }
    )


def _rank(logits: Tensor, token_id: int) -> int:
    """Returns the rank of a token in logits [v]; 0 is the most likely. Of equal logits, the lower id ranks first."""
    values = logits.numpy()
    return int((values > values[token_id]).sum() + (values[:token_id] == values[token_id]).sum())


def says_state(words: str, true_state: str | None, example: Example | None) -> bool | None:
    """Returns True if a thought's words end in the task's true state, or in the task's own thought for that state.

    Returns None if `words` is empty, or if the state or the example is None.
    """
    if not words or true_state is None or example is None:
        return None
    question = example.question
    pairs = zip(question.states, question.thoughts, strict=True) if question.thoughts else ()
    true_texts = {true_state, *(thought for state, thought in pairs if state == true_state)}
    return any(words == text or words.endswith(f" {text}") for text in true_texts)


def _true_states(request: Request, model: CachedLM) -> Sequence[str | None]:
    """Returns the task's true state (text or None) after each prompt token; () if the states are not known."""
    if request.example is None:
        return ()
    try:
        states = request.example.states_after_tokens(model.tokenizer)
    except ValueError:
        return ()
    pads = request.num_prompt_tokens - len(states)
    return [None] * pads + states if pads >= 0 else ()
