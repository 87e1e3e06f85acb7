"""Reads responses of other programs: files and objects of JSON, vLLM's outputs, Hugging Face's `generate` outputs,
texts and token ids.

JSON is in OpenAI's layout (vLLM, SGLang and others), SGLang's own, or a plain one. OpenAI's layout: `choices`, each
with `text` or `message.content`, and `logprobs`. vLLM adds `token_ids` to a choice and `prompt_token_ids` if the
request asks for return_token_ids, and writes tokens as "token_id:42" if it asks for return_tokens_as_token_ids.
SGLang's own layout: `output_ids` and `meta_info.output_token_logprobs`, a list of [log-probability, token id, text].
The plain layout: prompt or prompt_token_ids, text or token_ids, logprobs and drafts.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from cacheprobe.core.values import listed, whole_number
from cacheprobe.trace.importers.common import prompt_mask, split_sequences
from cacheprobe.trace.replays.response import ReplayRefused, Response, accepted_drafts, drafts_in, ids_in, nats_in

LARGEST_BYTES = 2**28
"""Largest file of responses that is read at once."""
_TOKEN_ID = "token_id:"
_ASK = "ask the server for token ids: return_token_ids=True with vLLM, return_logprob=True with SGLang"
_KINDS = (
    "responses must be files, JSON objects, outputs of vLLM or Hugging Face's generate, texts, or lists of token ids"
)
Json = Mapping[str, object]


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


def _made(
    where: str,
    token_ids: object = None,
    text: object = None,
    prompt: object = None,
    nats: object = None,
    names: "tuple[str, ...] | None" = None,
    drafts: object = (),
) -> Response:
    """Returns a Response of the fields that another program gave, None for those that it did not. names: texts of the
    tokens. Raises: ReplayRefused for a field of another kind."""
    return Response(
        where,
        None if token_ids is None else ids_in(token_ids, f"{where}, token_ids"),
        text if isinstance(text, str) else "",
        prompt if prompt is None or isinstance(prompt, str) else ids_in(prompt, f"{where}, prompt_token_ids"),
        None if nats is None else nats_in(nats, f"{where}, logprobs"),
        None if token_ids is not None else names,
        drafts_in(drafts, f"{where}, drafts"),
    )


# -- JSON


def read_file(path: Path) -> Iterator[Response]:
    """Yields the responses of a file: one JSON object, a list of them, or one object in each line (JSONL).

    Raises: ReplayRefused for a file that is too large, no regular file, or no JSON of a known layout.
    """
    if not path.is_file():
        raise ReplayRefused(f"{path} is no file of responses")
    if (size := path.stat().st_size) > LARGEST_BYTES:
        raise ReplayRefused(f"{path} has {size:,} bytes, more than {LARGEST_BYTES:,}; split it into smaller files")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayRefused(f"{path} cannot be read as text: {error!s:.120}") from error
    lines = [(f"{path.name} line {number}", line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_one = len(lines) == 1 or not lines or not lines[0][1].rstrip().endswith("}")
    for where, part in [(path.name, text)] if is_one else lines:
        try:
            found = json.loads(part)
        except (ValueError, RecursionError) as error:
            raise ReplayRefused(f"{where} is no JSON: {error!s:.120}") from error
        for index, item in enumerate(found if isinstance(found, list) else [found]):
            yield from read_json(item, f"{where}, response {index}" if isinstance(found, list) else where)


def read_json(item: object, where: str) -> Iterator[Response]:
    """Yields the responses of one decoded JSON object: one for each choice. where: names it in errors."""
    if not isinstance(item, Mapping):
        raise ReplayRefused(f"{where} must be a JSON object, got {item!r:.60}")
    if "choices" in item:
        choices = item["choices"]
        if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
            raise ReplayRefused(f"{where}: choices must be a list of at least one object, got {choices!r:.60}")
        for index, choice in enumerate(choices):
            is_only = len(choices) == 1
            yield _openai(item, choice, where if is_only else f"{where}, choice {index}", is_only)
    elif "meta_info" in item:
        yield _sglang(item, where)
    else:
        yield _plain(item, where)


def _openai(whole: Json, choice: object, where: str, is_only: bool) -> Response:
    """Reads one choice of a response in OpenAI's layout. is_only: whether there is no other choice, whose drafts the
    field `metrics` would also count."""
    choice = _object(choice, where)
    message = None if choice.get("message") is None else _object(choice["message"], f"{where}, message")
    nats, names = _logprobs(choice.get("logprobs"), where)
    token_ids = choice.get("token_ids")
    if token_ids is None and names and all(name.startswith(_TOKEN_ID) for name in names):
        token_ids = [_number(name, where) for name in names]
    for other in ("reasoning_content", "reasoning", "tool_calls"):
        if token_ids is None and message is not None and message.get(other):
            raise ReplayRefused(f"{where} also generated {other}, whose place in the text is not known; {_ASK}")
    text = choice.get("text") if message is None else message.get("content")
    prompt = choice.get("prompt_token_ids") or whole.get("prompt_token_ids")
    made = _made(where, token_ids, text, prompt, nats, names, choice.get("drafts", whole.get("drafts", ())))
    if made.drafts or not is_only:
        return made
    return replace(made, drafts=accepted_drafts(whole.get("metrics"), made.token_ids, where))


def _logprobs(given: object, where: str) -> tuple[object, tuple[str, ...] | None]:
    """Returns (log-probabilities, texts of the tokens) of the field `logprobs`, of completions or of chats; (None,
    None) if it is empty."""
    held = {} if given is None else _object(given, f"{where}, logprobs")
    if (content := held.get("content")) is not None:
        entries = [_object(one, f"{where}, logprobs.content") for one in _list(content, f"{where}, logprobs.content")]
        nats, names = [one.get("logprob") for one in entries], [one.get("token") for one in entries]
    elif (nats := held.get("token_logprobs")) is not None:
        names = _list(held.get("tokens", []), f"{where}, logprobs.tokens")
    else:
        return None, None
    texts = tuple(name for name in names if isinstance(name, str))
    if len(texts) < len(names):
        raise ReplayRefused(f"{where}: the tokens of logprobs must be text, got {names!r:.60}")
    return nats, texts


def _sglang(item: Json, where: str) -> Response:
    """Reads a response of SGLang's /generate. The prompt is taken from it if all of its tokens are there."""
    about = _object(item["meta_info"], f"{where}, meta_info")
    nats, prompt, token_ids = None, None, item.get("output_ids")
    if about.get("output_token_logprobs") is not None:
        nats, ids = _pairs(about["output_token_logprobs"], f"{where}, output_token_logprobs")
        if token_ids is not None and ids_in(ids, where) != ids_in(token_ids, f"{where}, output_ids"):
            raise ReplayRefused(f"{where}: output_ids and output_token_logprobs are of different tokens")
        token_ids = ids
    if about.get("input_token_logprobs") is not None:
        _, before = _pairs(about["input_token_logprobs"], f"{where}, input_token_logprobs")
        prompt = before if len(before) == about.get("prompt_tokens") else None
    return _made(where, token_ids, item.get("text"), prompt, nats, drafts=item.get("drafts", ()))


def _pairs(pairs: object, what: str) -> tuple[list[object], list[object]]:
    """Returns (log-probabilities, token ids) of a list of [log-probability, token id, ...]."""
    entries = [_list(one, f"{what}: an entry") for one in _list(pairs, what)]
    if short := [one for one in entries if len(one) < 2]:
        raise ReplayRefused(f"{what}: an entry must be [log-probability, token id, ...], got {short[0]!r:.60}")
    return [one[0] for one in entries], [one[1] for one in entries]


def _plain(item: Json, where: str) -> Response:
    """Reads a response in the plain layout."""
    if "token_ids" not in item and not isinstance(item.get("text"), str):
        held = sorted(map(str, item))[:8]
        raise ReplayRefused(f"{where} has the keys {held}; expected choices, meta_info, token_ids or text")
    prompt, given, nats = item.get("prompt"), item.get("prompt_token_ids"), item.get("logprobs")
    if prompt is not None and not isinstance(prompt, str):
        raise ReplayRefused(f"{where}: prompt must be text, got {prompt!r:.60}; token ids are prompt_token_ids")
    if nats is not None and item.get("token_ids") is None:
        raise ReplayRefused(f"{where} has logprobs of unknown tokens; give token_ids too")
    prompt = prompt if given is None else ids_in(given, f"{where}, prompt_token_ids")
    return _made(where, item.get("token_ids"), item.get("text"), prompt, nats, drafts=item.get("drafts", ()))


def _object(value: object, what: str) -> Json:
    if not isinstance(value, Mapping):
        raise ReplayRefused(f"{what} must be a JSON object, got {value!r:.60}")
    return value


def _list(value: object, what: str) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ReplayRefused(f"{what} must be a list, got {value!r:.60}; {_ASK}")
    return value


def _number(name: str, where: str) -> int:
    """Returns the id of a token that is written as "token_id:42"."""
    digits = name.removeprefix(_TOKEN_ID)
    if not (digits.isascii() and digits.isdigit() and len(digits) < 12):
        raise ReplayRefused(f"{where}: {name!r:.40} is no token id")
    return int(digits)


# -- Python


def _vllm(output: object, where: str) -> Iterator[Response]:
    """Reads an output of `LLM.generate`: one response for each of its samples. Its log-probabilities are dicts by token
    id, one for each token."""
    prompt = ids_in(getattr(output, "prompt_token_ids", None), f"{where}, prompt_token_ids")
    for index, sample in enumerate(getattr(output, "outputs", ())):
        name = f"{where}, output {index}"
        token_ids = ids_in(getattr(sample, "token_ids", None), f"{name}, token_ids")
        nats, by_token = None, getattr(sample, "logprobs", None)
        if by_token is not None:
            nats = [_nats_at(*pair) for pair in zip(by_token, token_ids, strict=False)]
        yield _made(name, token_ids, getattr(sample, "text", ""), prompt, nats)


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
    mask, logits = prompt_mask(attention_mask, sequences, None, ReplayRefused), getattr(outputs, "logits", None)
    for row, (prompt, generated) in enumerate(split_sequences(sequences, mask, stops)):
        yield Response(f"sequence {row}", generated, "", prompt, _nats_of(logits, row, generated))


def _nats_of(logits: object, row: int, token_ids: Sequence[int]) -> tuple[float, ...] | None:
    """Returns the log-probability of each token of a sequence; None without logits. logits: of each pass [b, v]."""
    if not isinstance(logits, tuple | list):
        return None
    if len(logits) < len(token_ids):
        raise ReplayRefused(f"sequence {row} has {len(token_ids)} tokens, and logits of {len(logits)} passes")
    rows = [logits[step][row].float().log_softmax(-1) for step in range(len(token_ids))]
    return tuple(float(values[token]) for values, token in zip(rows, token_ids, strict=True))
