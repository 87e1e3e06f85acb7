"""Reads responses that servers give as JSON: OpenAI's layout (vLLM, SGLang and others), SGLang's own, and a plain one.

OpenAI's layout: `choices`, each with `text` or `message.content`, and `logprobs`. vLLM adds `token_ids` to a choice and
`prompt_token_ids` if the request asks for return_token_ids, and writes tokens as "token_id:42" if it asks for
return_tokens_as_token_ids. SGLang's own layout: `output_ids` and `meta_info.output_token_logprobs`, a list of
[log-probability, token id, text]. The plain layout: prompt or prompt_token_ids, text or token_ids, logprobs and drafts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from cacheprobe.trace.replays.acceptance import accepted_drafts
from cacheprobe.trace.replays.response import ReplayRefused, Response, drafts_in, ids_in, nats_in

LARGEST_BYTES = 2**28
"""Largest file of responses that is read at once."""
_TOKEN_ID = "token_id:"
_ASK = "ask the server for token ids: return_token_ids=True with vLLM, return_logprob=True with SGLang"
Json = Mapping[str, object]


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
    if not isinstance(choice, Mapping):
        raise ReplayRefused(f"{where} must be a JSON object, got {choice!r:.60}")
    message = choice.get("message")
    text = choice.get("text") if message is None else _object(message, f"{where}, message").get("content")
    prompt = choice.get("prompt_token_ids") or whole.get("prompt_token_ids")
    nats, names = _logprobs(choice.get("logprobs"), where)
    token_ids = None
    if choice.get("token_ids") is not None:
        token_ids = ids_in(choice["token_ids"], f"{where}, token_ids")
    elif names is not None and names and all(name.startswith(_TOKEN_ID) for name in names):
        token_ids = ids_in([_number(name, where) for name in names], f"{where}, tokens")
    if token_ids is None and isinstance(message, Mapping):
        for other in ("reasoning_content", "reasoning", "tool_calls"):
            if message.get(other):
                raise ReplayRefused(f"{where} also generated {other}, whose place in the text is not known; {_ASK}")
    return Response(
        where,
        token_ids,
        text if isinstance(text, str) else "",
        None if prompt is None else ids_in(prompt, f"{where}, prompt_token_ids"),
        nats,
        None if token_ids is not None else names,
        drafts_in(choice.get("drafts", whole.get("drafts", ())), f"{where}, drafts")
        or accepted_drafts(whole.get("metrics") if is_only else None, token_ids, where),
    )


def _logprobs(given: object, where: str) -> tuple[tuple[float, ...] | None, tuple[str, ...] | None]:
    """Returns (log-probabilities, texts of the tokens) of the field `logprobs`, of completions or of chats; (None,
    None) if it is empty."""
    if given is None:
        return None, None
    held = _object(given, f"{where}, logprobs")
    if (content := held.get("content")) is not None:
        entries = [_object(one, f"{where}, logprobs.content") for one in _list(content, f"{where}, logprobs.content")]
        nats, names = [one.get("logprob") for one in entries], [one.get("token") for one in entries]
    elif held.get("token_logprobs") is not None:
        nats = _list(held["token_logprobs"], f"{where}, token_logprobs")
        names = _list(held.get("tokens", []), f"{where}, logprobs.tokens")
    else:
        return None, None
    if not all(isinstance(name, str) for name in names):
        raise ReplayRefused(f"{where}: the tokens of logprobs must be text, got {names!r:.60}")
    return nats_in(nats, f"{where}, logprobs"), tuple(cast("list[str]", names))


def _sglang(item: Json, where: str) -> Response:
    """Reads a response of SGLang's /generate. The prompt is taken from it if all of its tokens are there."""
    about = _object(item["meta_info"], f"{where}, meta_info")
    nats = token_ids = prompt = None
    if (pairs := about.get("output_token_logprobs")) is not None:
        token_ids, nats = _pairs(pairs, f"{where}, output_token_logprobs")
    if (given := item.get("output_ids")) is not None:
        listed = ids_in(given, f"{where}, output_ids")
        if token_ids is not None and token_ids != listed:
            raise ReplayRefused(f"{where}: output_ids and output_token_logprobs are of different tokens")
        token_ids = listed
    if (before := about.get("input_token_logprobs")) is not None:
        entries = _list(before, f"{where}, input_token_logprobs")
        if len(entries) == about.get("prompt_tokens"):
            prompt = ids_in([_entry(one, where)[1] for one in entries], f"{where}, input_token_logprobs")
    text = item.get("text")
    drafts = drafts_in(item.get("drafts", ()), f"{where}, drafts")
    return Response(where, token_ids, text if isinstance(text, str) else "", prompt, nats, None, drafts)


def _pairs(pairs: object, what: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns (token ids, log-probabilities) of a list of [log-probability, token id, ...]."""
    entries = [_entry(one, what) for one in _list(pairs, what)]
    return ids_in([one[1] for one in entries], what), nats_in([one[0] for one in entries], what)


def _entry(one: object, what: str) -> Sequence[object]:
    if not isinstance(one, Sequence) or isinstance(one, str) or len(one) < 2:
        raise ReplayRefused(f"{what}: an entry must be [log-probability, token id, ...], got {one!r:.60}")
    return one


def _plain(item: Json, where: str) -> Response:
    """Reads a response in the plain layout."""
    if "token_ids" not in item and not isinstance(item.get("text"), str):
        held = sorted(map(str, item))[:8]
        raise ReplayRefused(f"{where} has the keys {held}; expected choices, meta_info, token_ids or text")
    prompt, given, nats = item.get("prompt"), item.get("prompt_token_ids"), item.get("logprobs")
    if prompt is not None and not isinstance(prompt, str):
        raise ReplayRefused(f"{where}: prompt must be text, got {prompt!r:.60}; token ids are prompt_token_ids")
    token_ids = None if item.get("token_ids") is None else ids_in(item["token_ids"], f"{where}, token_ids")
    if nats is not None and token_ids is None:
        raise ReplayRefused(f"{where} has logprobs of unknown tokens; give token_ids too")
    return Response(
        where,
        token_ids,
        text if isinstance(text := item.get("text"), str) else "",
        prompt if given is None else ids_in(given, f"{where}, prompt_token_ids"),
        None if nats is None else nats_in(nats, f"{where}, logprobs"),
        None,
        drafts_in(item.get("drafts", ()), f"{where}, drafts"),
    )


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
