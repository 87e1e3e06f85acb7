"""Converts the user's prompts to token ids of a model. Invalid prompts raise ValueError with the number of the
request."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast, runtime_checkable

from cacheprobe.core.live import LiveTokenizer, ModuleValue
from cacheprobe.core.records import Request
from cacheprobe.core.values import Json, require_encodable, whole_number
from cacheprobe.models.base import CachedLM

KINDS = "a prompt is text, a list of token ids, a cp.Chat, a task example or a Request"


@runtime_checkable
class PromptExample(Protocol):
    """Describes a task example that can be given as a prompt: any object with a method `prompt_text` (a Protocol)."""

    def prompt_text(self, tokenizer: LiveTokenizer) -> str:
        """Returns the prompt as text, for a model with this tokenizer."""
        ...


@dataclass(frozen=True)
class Chat:
    """Holds a conversation, as a prompt in the chat template of the model's tokenizer; the model's turn follows.

    Raises: ValueError for messages that are not dicts of two texts, "role" and "content".
    """

    messages: Sequence[Mapping[str, str]]
    """Turns such as {"role": "user", "content": "What is two and two?"}."""
    options: Mapping[str, Json] = field(default_factory=dict)
    """Further variables of the template, such as {"enable_thinking": False}; a template ignores unknown ones."""

    chat = True

    def __post_init__(self) -> None:
        messages = self.messages
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
            raise ValueError(f"a chat is a list of messages, got {messages!r:.60}")
        if own := {"tokenize", "add_generation_prompt", "conversation"} & set(self.options):
            raise ValueError(f"options of a chat are variables of its template; {min(own)} is set by cacheprobe")
        for message in messages:
            texts = [message.get(name) for name in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"a message is a dict with the texts role and content, got {message!r:.60}")

    def prompt_text(self, tokenizer: LiveTokenizer) -> str:
        """Returns the conversation in the tokenizer's chat template, up to where the model's turn begins.

        Raises: ValueError if there is no tokenizer with a chat template, or if the template refuses the messages.
        """
        if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("the model has no chat template, so it takes no cp.Chat; give the text itself")
        messages = [dict(message) for message in self.messages]
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self.options)
        except Exception as error:  # a template raises errors of its own
            raise ValueError(f"the chat template refuses the messages, {_kind(error)}") from error


Prompt: TypeAlias = str | Iterable[int] | PromptExample
"""Prompt as the user gives it: text, token ids or a task example."""


class Unpadded(tuple[int, ...]):
    """Holds the token ids of a prompt that a tokenizer's attention mask shows to be without padding."""


def as_list(prompts: object) -> list[object]:
    """Returns the user's prompts as a list. One text, example or Request becomes a list of one; a list of whole numbers
    is one prompt of token ids; of what a tokenizer returns, also in a list, each row of input_ids is a prompt, without
    its padding.
    Raises: ValueError for an empty list, another mapping, bytes, or an object that is not iterable."""
    if isinstance(prompts, str | Request) or hasattr(prompts, "prompt_text"):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _rows_of_encoding(prompts)
    if isinstance(prompts, bytes | bytearray | memoryview):
        raise ValueError(f"{KINDS}; got bytes, {prompts!r:.60}; decode them first")
    if not isinstance(prompts, Iterable):
        raise ValueError(f"{KINDS}; got {prompts!r:.60}")
    listed = list(prompts)
    if not listed:
        raise ValueError("there are no prompts; give at least one")
    listed = [one for item in listed for one in (_rows_of_encoding(item) if isinstance(item, Mapping) else [item])]
    return [listed] if all(isinstance(item, int) or getattr(item, "ndim", None) == 0 for item in listed) else listed


def _rows_of_encoding(encoding: Mapping[str, ModuleValue]) -> list[object]:
    """Returns the prompts of what a tokenizer returns, a mapping with input_ids: each row's token ids where the
    attention mask is not 0. Raises: ValueError for a mapping without input_ids, and for a mask of another shape or with
    a hole."""
    ids = encoding.get("input_ids")
    if ids is None:
        raise ValueError(f"{KINDS}; got a mapping without input_ids, {', '.join(map(str, encoding)):.60}")
    rows = [list(row) for row in (ids if not len(ids) or isinstance(ids[0], Iterable) else [ids])]
    mask = encoding.get("attention_mask")
    if mask is None:
        return [*rows]
    masks = [[bool(i) for i in row] for row in (mask if not len(mask) or isinstance(mask[0], Iterable) else [mask])]
    if [*map(len, rows)] != [*map(len, masks)]:
        raise ValueError(f"attention_mask has rows of {[*map(len, masks)]} tokens, input_ids of {[*map(len, rows)]}")
    for number, own in enumerate(masks):
        if "10" in "".join(str(int(i)) for i in own).strip("0"):
            raise ValueError(
                f"row {number} of attention_mask leaves out tokens between others; a prompt is one stretch of text, so "
                "give its token ids"
            )
    return [
        Unpadded(int(i) for i, is_kept in zip(row, own, strict=True) if is_kept)
        for row, own in zip(rows, masks, strict=True)
    ]


def require_unpadded(prompts: Sequence[object], tokenizer: LiveTokenizer, what: str = "request {}") -> None:
    """Checks that valid prompts hold no padding if they were given as token ids. what: the name of prompt {} in errors.

    A pad token at an end counts if it has no other use; if it also starts or ends texts, two in a row count, and one
    that fills a prompt up to the others' length.
    Raises: ValueError for a prompt with padding.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return
    given = {i: ids for i, item in enumerate(prompts) if (ids := _ids_given(item))}
    has_other_use = pad in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    ends = {i: [tuple(ids[:2]), tuple(ids[:-3:-1])] for i, ids in given.items()}
    touching = {i for i, both in ends.items() if any(end[0] == pad for end in both)}
    doubled = {i for i, both in ends.items() if (pad, pad) in both}
    is_batch = len(given) > 1 and len({*map(len, given.values())}) == 1 and len(touching) < len(given)
    if bad := sorted(touching if is_batch or not has_other_use else doubled):
        raise ValueError(
            f"{what.format(bad[0])}: its token ids begin or end with the padding token {pad}, which would be read as "
            "text; give what the tokenizer returns, input_ids with attention_mask, or the ids without padding"
        )


def _ids_given(item: ModuleValue) -> tuple[int, ...]:
    """Returns the token ids of a prompt that was given as ids and may hold padding; () for another prompt."""
    if isinstance(item, Request):
        item = () if item.prompt_token_ids else item.prompt  # the ids of an earlier run were checked there
    return () if isinstance(item, str | Unpadded | Mapping | PromptExample) else tuple(map(int, item))


def as_token_ids(model: CachedLM, prompt: Prompt, what: str) -> tuple[int, ...]:
    """Returns the token ids of a prompt given as text, token ids or a task example. what: the prompt's name in errors.

    Raises: ValueError for an empty prompt, a token id outside the vocabulary, or more tokens than the model's context.
    """
    if isinstance(prompt, PromptExample):
        is_chat, prompt = bool(getattr(prompt, "chat", False)), prompt.prompt_text(model.tokenizer)
        ids = encode_prompt(model, prompt, f"the {what} prompt", is_chat)
    elif isinstance(prompt, str):
        ids = encode_prompt(model, prompt, f"the {what} prompt")
    else:
        given, *others = (
            _rows_of_encoding(cast("Mapping[str, ModuleValue]", prompt)) if isinstance(prompt, Mapping) else [prompt]
        )
        if others:
            raise ValueError(f"the {what} prompt is one text, and {1 + len(others)} rows of input_ids were given")
        ids = given_ids(model, cast("Iterable[object]", given), f"the {what} prompt")
        require_unpadded([ids if given is prompt else ()], model.tokenizer, f"the {what} prompt")
    if not ids:
        raise ValueError(f"the {what} prompt is empty; give at least one token")
    if bad := [t for t in ids if not 0 <= t < model.d_vocab]:
        raise ValueError(f"{what} prompt: token id {bad[0]} is outside the vocabulary of {model.d_vocab}")
    if len(ids) > model.n_ctx:
        raise ValueError(f"{what} prompt: {len(ids)} tokens exceed the model's context of {model.n_ctx}; shorten it")
    return ids


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
        require_encodable(f"request {index}: the prompt", prompt)
        ids = encode_prompt(model, prompt, f"request {index}", is_chat)
    else:
        try:
            if not isinstance(prompt, Iterable):
                raise TypeError(f"{type(prompt).__name__!r} object is not iterable")
            if isinstance(prompt, bytes | bytearray | memoryview):
                raise ValueError("decode bytes first")
            ids = given_ids(model, prompt, f"request {index}")
        except (TypeError, ValueError) as error:
            raise ValueError(f"request {index}: {KINDS}; got {prompt!r:.60} ({error})") from error
    if not ids or (isinstance(prompt, str) and not prompt):
        raise ValueError(f"request {index}: the prompt is empty; give at least one token")
    if bad := [t for t in ids if not 0 <= t < model.d_vocab]:
        whose = "; is its tokenizer another model's?" if isinstance(prompt, str) else ""
        raise ValueError(f"request {index}: token id {bad[0]} is outside the vocabulary of {model.d_vocab}{whose}")
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


def encode_prompt(model: CachedLM, text: str, what: str, is_chat: bool = False) -> tuple[int, ...]:
    """Returns the token ids of a prompt's text. Where the text begins with the tokens that the tokenizer adds in front,
    as the text of a chat template does, keeps them once, and warns. what: the prompt's name in the warning.

    is_chat: the text already contains its special tokens, so none are added.
    """
    ids = model.encode(text, add_special_tokens=not is_chat)
    if is_chat or not (own := model.encode(text, add_special_tokens=False)):
        return ids
    num_added = next((n for n in range(len(ids) - len(own), 0, -1) if ids[n : n + len(own)] == own), 0)
    start = ids[:num_added]
    if not start or own[:num_added] != start or own[num_added : 2 * num_added] == start:
        return ids
    warnings.warn(
        f"{what}: its text begins with {model.decode(start)}, and the tokenizer adds another; one is kept. Give a "
        "conversation as cp.Chat, or the text without it",
        RuntimeWarning,
        stacklevel=2,
    )
    return ids[num_added:]


def given_ids(model: CachedLM, token_ids: Iterable[object], what: str) -> tuple[int, ...]:
    """Returns token ids that a user gave as a prompt. Warns if they begin with two start tokens, as those of a chat
    template's text do if the tokenizer adds one. Raises: ValueError for what is no whole number."""
    ids = tuple(whole_number("a token id", token_id) for token_id in token_ids)
    start = getattr(model.tokenizer, "bos_token_id", None)
    if start is not None and ids[:2] == (start, start):
        warnings.warn(
            f"{what}: its token ids begin with two start tokens, {start}; leave out one, or give a cp.Chat",
            RuntimeWarning,
            stacklevel=2,
        )
    return ids


def _kind(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.200}"
