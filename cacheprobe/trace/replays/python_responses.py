"""Reads responses that are Python objects: vLLM's outputs, Hugging Face's `generate` outputs, texts and token ids."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cacheprobe.core.values import listed, whole_number
from cacheprobe.trace.replays.json_responses import read_file, read_json
from cacheprobe.trace.replays.response import ReplayRefused, Response, ids_in, nats_in

_KINDS = (
    "responses must be files, JSON objects, outputs of vLLM or Hugging Face's generate, texts, or lists of token ids"
)


def read_responses(
    responses: object, attention_mask: object = None, stop_token_ids: int | Iterable[int] = ()
) -> list[Response]:
    """Returns the responses of one object or of a sequence of them, in order.

    attention_mask, stop_token_ids: of a `generate` output, see `cp.replay`; a sequence ends after a stop token.
    Raises: ReplayRefused for other objects, and for a response that generated nothing.
    """
    if isinstance(responses, Tensor) or hasattr(responses, "sequences"):
        stops = frozenset(whole_number("a stop token", token) for token in listed(stop_token_ids))
        return list(_generate(responses, attention_mask, stops))
    if isinstance(responses, str | Path | Mapping) or hasattr(responses, "outputs"):
        items: list[object] = [responses]
    elif isinstance(responses, Iterable) and not isinstance(responses, bytes):
        items = list(responses)
    else:
        raise ReplayRefused(f"{_KINDS}; got {responses!r:.60}")
    if items and all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        items = [items]
    found: list[Response] = []
    for index, item in enumerate(items):
        found += _one(_as_python(item), f"response {index}")
    if not found:
        raise ReplayRefused("there are no responses; give at least one")
    return found


def _as_python(item: object) -> object:
    """Returns an array of token ids [t] as a list; another object as it is."""
    if isinstance(item, np.ndarray | Tensor) and item.ndim == 1:
        return item.tolist()
    return item


def _one(item: object, where: str) -> Iterator[Response]:
    if isinstance(item, Path):
        yield from read_file(item)
    elif isinstance(item, Mapping):
        yield from read_json(item, where)
    elif isinstance(item, str):
        if item.endswith((".json", ".jsonl")):
            raise ReplayRefused(
                f"{where} is the text {item!r:.60}; if it names a file, give pathlib.Path({item!r:.60})"
            )
        yield Response(where, None, item)
    elif hasattr(item, "outputs"):
        yield from _vllm(item, where)
    elif isinstance(item, Iterable) and not isinstance(item, bytes):
        yield Response(where, ids_in(item, where))
    else:
        raise ReplayRefused(f"{_KINDS}; {where} is {item!r:.60}")


def _vllm(output: object, where: str) -> Iterator[Response]:
    """Reads an output of `LLM.generate`: one response for each of its samples. Its log-probabilities are dicts by token
    id, one for each token."""
    prompt = ids_in(getattr(output, "prompt_token_ids", None), f"{where}, prompt_token_ids")
    for index, sample in enumerate(getattr(output, "outputs", ())):
        name = f"{where}, output {index}"
        token_ids = ids_in(getattr(sample, "token_ids", None), f"{name}, token_ids")
        nats, by_token = None, getattr(sample, "logprobs", None)
        if by_token is not None:
            nats = nats_in([_nats_at(*pair) for pair in zip(by_token, token_ids, strict=False)], f"{name}, logprobs")
        yield Response(name, token_ids, getattr(sample, "text", ""), prompt, nats)


def _nats_at(by_token: object, token_id: int) -> object:
    """Returns a token's log-probability of vLLM's dict by token id; None if it is not there."""
    return getattr(by_token.get(token_id), "logprob", None) if isinstance(by_token, Mapping) else None


def _generate(outputs: object, attention_mask: object, stops: frozenset[int]) -> Iterator[Response]:
    """Reads token ids [b, t] of `generate`, or its output object with `sequences` and perhaps `logits`. A sequence ends
    after its first stop token."""
    sequences = outputs if isinstance(outputs, Tensor) else getattr(outputs, "sequences", None)
    if not isinstance(sequences, Tensor) or sequences.ndim != 2 or sequences.is_floating_point():
        raise ReplayRefused("the sequences of generate must be token ids [b, t]")
    if getattr(outputs, "beam_indices", None) is not None:
        raise ReplayRefused(
            "the sequences are of beam search, whose logits belong to other beams; give sequences alone"
        )
    if attention_mask is None:
        raise ReplayRefused("give attention_mask=, as generate was given it: it says where each prompt ends")
    mask = torch.atleast_2d(torch.as_tensor(attention_mask).bool().cpu())
    if mask.ndim != 2 or len(mask) != len(sequences) or mask.shape[1] >= sequences.shape[1]:
        raise ReplayRefused(
            f"attention_mask {tuple(mask.shape)} does not fit sequences {tuple(sequences.shape)}; it needs one row for "
            "each sequence (repeat_interleave(num_return_sequences)) and the prompts' length"
        )
    if bool((~mask[:, -1]).any() or (mask.long().diff(dim=1) < 0).any()):
        raise ReplayRefused("the prompts are padded on the right or in between; generate needs padding on the left")
    width, logits = mask.shape[1], getattr(outputs, "logits", None)
    for row, ids in enumerate(sequences.tolist()):
        prompt = tuple(token for token, is_there in zip(ids[:width], mask[row].tolist(), strict=True) if is_there)
        generated = ids[width:]
        end = next((index + 1 for index, token in enumerate(generated) if token in stops), len(generated))
        yield Response(f"sequence {row}", tuple(generated[:end]), "", prompt, _nats_of(logits, row, generated[:end]))


def _nats_of(logits: object, row: int, token_ids: Sequence[int]) -> tuple[float, ...] | None:
    """Returns the log-probability of each token of a sequence; None without logits. logits: of each pass [b, v]."""
    if not isinstance(logits, tuple | list):
        return None
    if len(logits) < len(token_ids):
        raise ReplayRefused(f"sequence {row} has {len(token_ids)} tokens, and logits of {len(logits)} passes")
    rows = [logits[step][row].float().log_softmax(-1) for step in range(len(token_ids))]
    return tuple(float(values[token]) for values, token in zip(rows, token_ids, strict=True))
