"""Makes the requests of a replay: the tokens of each prompt and of each response."""

from collections.abc import Sequence
from typing import Any, cast

from cacheprobe.core.records import Request
from cacheprobe.models.base import CachedLM
from cacheprobe.models.prompts import Chat, PromptExample, as_list, text_of, token_ids_of
from cacheprobe.trace.replays.response import ReplayRefused, Response


def requests_of(model: CachedLM, responses: Sequence[Response], prompts: object) -> list[Request]:
    """Returns a Request with forced tokens for each response.

    prompts: a text, token ids or a task example for each response, or one for all; None if the responses hold theirs.
    Raises: ReplayRefused for a response without a prompt, with other tokens than its prompt argument, or with text
    whose tokens cannot be told from the prompt's.
    """
    given: list[object] = [None] * len(responses) if prompts is None else as_list(prompts)
    if len(given) == 1:
        given *= len(responses)
    if len(given) != len(responses):
        raise ReplayRefused(f"{len(given)} prompts for {len(responses)} responses; give one for each, or one for all")
    return [
        _request(model, response, prompt, index)
        for index, (response, prompt) in enumerate(zip(responses, given, strict=True))
    ]


def _request(model: CachedLM, response: Response, prompt: object, index: int) -> Request:
    """Returns the Request of one response. prompt: what the user gave for it, or None."""
    text, example, is_chat = prompt, None, False
    if isinstance(prompt, PromptExample):
        text, example, is_chat = text_of(prompt, model, index), prompt, bool(getattr(prompt, "chat", False))
    if text is None:
        text = response.prompt
    if text is None:
        raise ReplayRefused(f"{response.where} does not hold its prompt; give prompts=")
    ids = token_ids_of(text, model, index, is_chat)
    if isinstance(response.prompt, tuple) and response.prompt != ids:
        raise ReplayRefused(
            f"{response.where}: the prompt has {len(ids)} tokens here, and the other program read "
            f"{len(response.prompt)}; they differ from token {_first_difference(response.prompt, ids)} on; leave out "
            "prompts=, or give token ids"
        )
    forced = response.token_ids
    if forced is None:
        forced = _tokens_of(model, response, text if isinstance(text, str) else ids)
    for start, draft in response.drafts.items():
        if bad := [token for token in draft if not 0 <= token < model.d_vocab]:
            raise ReplayRefused(
                f"{response.where}: the draft at token {start} holds {bad[0]}, outside the vocabulary of {model.name}, "
                f"{model.d_vocab}"
            )
    if isinstance(prompt, Chat):  # its turns are found as those of a run are
        return Request(cast("Any", prompt), forced_token_ids=forced)
    return Request(ids, forced_token_ids=forced, example=example)


def _tokens_of(model: CachedLM, response: Response, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    """Returns the tokens of a response that is text alone: those after the prompt's, of both texts joined. Tokens that
    the tokenizer adds to every text are no part of it."""
    before = prompt if isinstance(prompt, str) else model.decode(prompt)
    ids, whole = (model.encode(text, add_special_tokens=False) for text in (before, before + response.text))
    is_read_alike = isinstance(prompt, str) or prompt[len(prompt) - len(ids) :] == ids
    if not is_read_alike or whole[: len(ids)] != ids or len(whole) == len(ids):
        raise ReplayRefused(
            f"{response.where}: its text joined to the prompt has other tokens at the seam, so the generated tokens "
            "are not known; give token ids"
        )
    found = whole[len(ids) :]
    if (names := response.token_texts) is not None:
        texts = tuple(model.decode([token]) for token in found)
        if texts != names:
            raise ReplayRefused(
                f"{response.where}: its text has other tokens here from token {_first_difference(texts, names)} on, so "
                "its log-probabilities have no place; ask the server for token ids"
            )
    return found


def _first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """Returns the first index at which two sequences differ, or the length of the shorter one."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(a), len(b)))
