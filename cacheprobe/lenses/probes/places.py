"""Finds the rows of a run that a probe can use, with the task's true state, and the groups that a split keeps
together."""

from collections.abc import Iterable, Iterator, Sequence

import pandas as pd
import torch
from torch import Tensor

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.records import Request
from cacheprobe.lenses.probes.groups import joined_groups
from cacheprobe.models.base import CachedLM
from cacheprobe.models.feeding import feed
from cacheprobe.trace.trace import Trace


def labelled(trace: Trace, at: "str | Iterable[int]" = "event", *, model: CachedLM | None = None) -> pd.DataFrame:
    """Returns a DataFrame of prompt rows with the task's true state: one line for each request and place (operation or
    position).

    at: "event", the token that completes the words of the k-th operation, k = 1, 2, ...; or positions, counted from 0
    at the first token of the text, or from -1 at the last token of the prompt. The statement of the initial state is no
    place, because all prompts with the same statement have the same model state at that token.
    Columns: request_id, place (k, or the requested position), position (absolute), row, label, word (the words of the
    newest operation), group: prompts that share their text up to one of the places are in one group.
    Raises: ValueError for requests without a task, positions that do not exist, and places without a true state.
    """
    model = model or trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use labelled(trace, model=...)")
    if isinstance(at, str) and at != "event":
        raise ValueError(f"unknown places at={at!r}; give 'event' or a list of positions such as [-1]")
    at = at if isinstance(at, str) else list(at)
    canonical = trace.row_table[trace.row_table.status == "committed"]
    rows = canonical.set_index(["request_id", "position"]).row
    records, prompts, texts = [], [], []
    for request in trace.requests:
        if request.example is None:
            raise ValueError(
                f"request {request.request_id} comes from no task, so its true state is not known; give fit() labels"
            )
        ids = tuple(request.prompt_token_ids or ())
        states = request.example.states_after_tokens(model.tokenizer)
        first = len(ids) - len(states)  # pads and special tokens stand in front
        for place, token, label, word in _places(request, model.tokenizer, states, at):
            row = int(rows.loc[(request.request_id, first + token)])
            records.append((request.request_id, place, first + token, row, label, word))
            prompts.append(ids[first:])
            texts.append(ids[first : first + token + 1])
    table = pd.DataFrame(records, columns=["request_id", "place", "position", "row", "label", "word"])
    return table.assign(group=joined_groups(prompts, texts))


def _places(
    request: Request, tokenizer: LiveTokenizer, states: Sequence[str | None], at: "str | Sequence[int]"
) -> Iterator[tuple[int, int, str, str]]:
    """Yields (place, token index in the text, true state, words of the newest operation) for each place of one request.
    Raises: ValueError for a position that does not exist or has no true state."""
    example = request.example
    text, spans = example.prompt_text(tokenizer), example.rendering(tokenizer).operations
    completed = example.completing_tokens(tokenizer)[1]
    words = [text[start:end] for start, end in spans]
    if isinstance(at, str):
        yield from zip(range(1, len(spans) + 1), completed, example.states[1:], words, strict=True)
        return
    for position in at:
        token = position if position >= 0 else len(states) + position
        if not 0 <= token < len(states):
            raise ValueError(
                f"request {request.request_id} has no position {position}: its text has {len(states)} tokens"
            )
        state = states[token]
        if state is None:
            raise ValueError(f"request {request.request_id}: no state holds yet at position {position}")
        newest = sum(index <= token for index in completed)
        yield position, token, state, words[newest - 1] if newest else ""


@torch.inference_mode()
def embeddings(trace: Trace, table: pd.DataFrame, model: CachedLM | None = None) -> Tensor | None:
    """Returns baseline features [n, 2m] for the n lines of the `labelled` table: the input of block 0 at the token,
    joined with its running mean up to that token. None for a model that adds thoughts before block 0."""
    model = model or trace.model
    if model is None:
        raise ValueError("this trace was loaded without its model; use embeddings(trace, table, model)")
    if 0 in model.injected_layers:
        return None
    by_request = {request.request_id: request for request in trace.requests}
    out: dict[int, Tensor] = {}
    for request_id in table.request_id.unique():
        ids = torch.tensor([by_request[request_id].prompt_token_ids])
        inputs = feed(model, ids, [("pre", 0)], num_layers=1).states["pre", 0][0].float().cpu()
        running_mean = inputs.cumsum(0) / torch.arange(1, len(inputs) + 1)[:, None]
        out[request_id] = torch.cat([inputs, running_mean], dim=1)
    return torch.stack([out[line.request_id][line.position] for line in table.itertuples()])
