"""Converts the user's prompts to token ids of a model. Invalid prompts raise ValueError with the number of the
request."""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias, runtime_checkable

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.records import Request
from cacheprobe.core.values import require_encodable, whole_number
from cacheprobe.models.base import CachedLM

KINDS = "a prompt is text, a list of token ids, a task example or a Request"


@runtime_checkable
class PromptExample(Protocol):
    """Describes a task example that can be given as a prompt: any object with a method `prompt_text` (a Protocol)."""

    def prompt_text(self, tokenizer: LiveTokenizer) -> str:
        """Returns the prompt as text, for a model with this tokenizer."""
        ...


Prompt: TypeAlias = str | Iterable[int] | PromptExample
"""Prompt as the user gives it: text, token ids or a task example."""


def as_list(prompts: object) -> list[object]:
    """Returns the user's prompts as a list. One text, example or Request becomes a list of one; a list of whole numbers
    is one prompt of token ids. Raises: ValueError for an empty list, a mapping, bytes, or an object that is not
    iterable."""
    if isinstance(prompts, str | Request) or hasattr(prompts, "prompt_text"):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise ValueError("prompts are a mapping, as a tokenizer returns; pass its input_ids as lists of token ids")
    if isinstance(prompts, bytes | bytearray | memoryview):
        raise ValueError(f"{KINDS}; got bytes, {prompts!r:.60}; decode them first")
    if not isinstance(prompts, Iterable):
        raise ValueError(f"{KINDS}; got {prompts!r:.60}")
    listed = list(prompts)
    if not listed:
        raise ValueError("there are no prompts; give at least one")
    return [listed] if all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in listed) else listed


def text_of(example: PromptExample, model: CachedLM, index: int) -> str:
    """Returns the prompt text of a task example. Raises: ValueError, with the request's number, if the example fails or
    gives no text; a ValueError of the example itself is passed on unchanged."""
    try:
        text = example.prompt_text(model.tokenizer)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"request {index}: its example's prompt_text failed, {_kind(error)}") from error
    if not isinstance(text, str):
        raise ValueError(f"request {index}: its example's prompt_text must return text, got {text!r:.60}")
    return text


def token_ids_of(prompt: object, model: CachedLM, index: int, is_chat: bool) -> tuple[int, ...]:
    """Returns a tuple of the token ids of one prompt: encodes a text, or checks given ids. Raises: ValueError, with the
    request's number, for an empty prompt, a wrong type, or an id outside the model's vocabulary; ModelError for text
    without a tokenizer.

    is_chat: the text already contains its special tokens, so none are added.
    """
    if isinstance(prompt, str):
        ids = _encoded(prompt, model, index, is_chat)
    else:
        try:
            if not isinstance(prompt, Iterable):
                raise TypeError(f"{type(prompt).__name__!r} object is not iterable")
            if isinstance(prompt, bytes | bytearray | memoryview):
                raise ValueError("decode bytes first")
            ids = tuple(whole_number("a token id", token_id) for token_id in prompt)
        except (TypeError, ValueError) as error:
            raise ValueError(f"request {index}: {KINDS}; got {prompt!r:.60} ({error})") from error
    if not ids or (isinstance(prompt, str) and not prompt):
        raise ValueError(f"request {index}: the prompt is empty; give at least one token")
    if bad := [t for t in ids if not 0 <= t < model.d_vocab]:
        raise ValueError(f"request {index}: token id {bad[0]} is outside the vocabulary of {model.d_vocab}")
    return ids


def answer_ids_of(request: Request, model: CachedLM) -> tuple[tuple[int, ...], str]:
    """Returns (token ids, ""): the first token of each possible answer of the request's task example. If the example's
    own code raises another error than ValueError, or gives no valid ids, returns ((), the reason as text).

    Returns ((), "") if the request has no example, or if the example's code raises ValueError, for example because two
    answers begin with the same token.
    """
    if request.example is None:
        return (), ""
    source = f"request {request.request_id}: answer_token_ids of its task's {type(request.example).__name__}"
    try:
        given = request.example.answer_token_ids(model.tokenizer)
    except ValueError:
        return (), ""
    except Exception as error:  # a user's own code: whatever it raises concerns this request alone
        return (), f"{source} failed, {_kind(error)}"
    try:
        if isinstance(given, str | bytes | Mapping):
            raise ValueError("not a list")
        ids = tuple(whole_number("a token id", token_id) for token_id in given)
    except (TypeError, ValueError):
        return (), f"{source} must return a list of token ids, got {given!r:.60}"
    if bad := [t for t in ids if not 0 <= t < model.d_vocab]:
        return (), f"{source} gave token {bad[0]}, outside the vocabulary of {model.d_vocab}"
    return ids, ""


def _encoded(text: str, model: CachedLM, index: int, is_chat: bool) -> tuple[int, ...]:
    require_encodable(f"request {index}: the prompt", text)
    return model.encode(text, add_special_tokens=not is_chat)


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"
