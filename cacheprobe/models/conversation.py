"""Finds the turns of a conversation in its prompt, and the tokens that end a turn or a text."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.records import Request
from cacheprobe.core.tokens import special_token_ids
from cacheprobe.models.base import CachedLM
from cacheprobe.models.prompts import Chat

_ASSISTANT = ("assistant", "model")
"""Roles of the model's own turns."""
_CONTENT = "2718281828"
"""The words of a turn, in which templates change nothing."""
_MARK = re.compile("\ue000(\\d+)\ue001")
"""Stands for the words of one message. No text has these signs: Unicode leaves them to private use."""


def stop_sources(model: CachedLM, is_chat: bool, chat: Chat | None = None) -> dict[int, str]:
    """Returns where each token is named that ends a request without stop tokens of its own, as a dict by token id.

    is_chat: the prompt is a conversation, so the end of the model's turn, and of the tokenizer's texts, end it too.
    chat: the conversation, if it is known.
    """
    sources = dict.fromkeys(model.stop_token_ids, model.stop_source)
    if is_chat:
        if (turn_end := _end_of_turn(model, chat or Chat([{"role": "user", "content": "?"}]))) is not None:
            sources.setdefault(turn_end, "the chat template")
        if (text_end := getattr(model.tokenizer, "eos_token_id", None)) is not None:
            sources.setdefault(text_end, "the tokenizer")
    return sources


def _end_of_turn(model: CachedLM, chat: Chat) -> int | None:
    """Returns the token that ends the model's turn in the chat template: the first special or added one behind its
    words, with another turn after them or without. None if there is none."""
    added: Mapping[int, object] = getattr(model.tokenizer, "added_tokens_decoder", {})
    known = {*special_token_ids(model), *added}
    turns = [*map(dict, chat.messages), {"role": "assistant", "content": _CONTENT}]
    for messages in ([*turns, {"role": "user", "content": "?"}], turns):
        try:
            text = model.tokenizer.apply_chat_template(messages, tokenize=False, **chat.options)
        except Exception:  # a template raises errors of its own
            continue
        after = text.rpartition(_CONTENT)[2] if _CONTENT in text else ""
        found = model.tokenizer(after, add_special_tokens=False).input_ids
        if (end := next((token_id for token_id in found if token_id in known), None)) is not None:
            return end
    return None


def stopped_by(model: CachedLM, request: Request, committed: Sequence[int]) -> str:
    """Returns what ended a request that finished with the reason "stop": its last token and where it is named as a stop
    token, or its stop text."""
    assert request.sampling is not None
    last, named = committed[-1], dict.fromkeys(model.stop_token_ids, model.stop_source)
    own: object = request.sampling.stop_token_ids
    assert isinstance(own, tuple)
    if last not in own:
        return f"a text of SamplingParams.stop, {', '.join(map(repr, request.sampling.stop or ()))}"
    if request.is_chat and (text_end := getattr(model.tokenizer, "eos_token_id", None)) is not None:
        named.setdefault(text_end, "the tokenizer")
    if request.is_chat and len(others := {*own} - {*named}) == 1:
        named |= dict.fromkeys(others, "the chat template")
    source = named[last] if {*own} == {*named} else "SamplingParams.stop_token_ids"
    return f"token {last} ({model.token_texts([last])[0]}) of {source}"


def assistant_turns(chat: Chat, tokenizer: LiveTokenizer, token_ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns (first token, token after the last) of each of the model's turns in a conversation; the last one is the
    turn to be generated. () if the turns are not found: the template changes another's words, or the tokenizer does not
    say where its tokens stand.

    A turn begins where the words of the turn before it end, so that what the template puts in front belongs to it.
    """
    text = chat.prompt_text(tokenizer)
    ends = _exact_ends(chat, tokenizer, text) or _found_ends(chat, text)
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except ValueError:  # of mistral-common, which gives no offsets; other tokenizers in Python leave them out
        return ()
    offsets = encoded.get("offset_mapping")
    if not ends or offsets is None or tuple(encoded["input_ids"]) != tuple(token_ids):
        return ()
    starts = [start for start, _ in offsets]

    def token_at(character: int) -> int:
        """Returns the index of the first token that begins at a character or after it."""
        return next((i for i, start in enumerate(starts) if start >= character), len(starts))

    begins = [0, *ends]
    own = [i for i, message in enumerate(chat.messages) if message["role"] in _ASSISTANT and begins[i] < ends[i]]
    return (*((token_at(begins[i]), token_at(ends[i])) for i in own), (token_at(begins[-1]), len(starts)))


def _exact_ends(chat: Chat, tokenizer: LiveTokenizer, text: str) -> list[int]:
    """Returns the character of a conversation's text at which the words of each message end, as marks in their place
    show it. [] if the template changes words, or leaves some out."""
    marked = [{**message, "content": f"\ue000{i}\ue001"} for i, message in enumerate(chat.messages)]
    try:
        pieces = _MARK.split(Chat(marked, chat.options).prompt_text(tokenizer))
    except ValueError:
        return []
    if [*map(int, pieces[1::2])] != [*range(len(marked))]:
        return []
    for change in (str, str.strip):
        words = [change(message["content"]) for message in chat.messages]
        if "".join(between + said for between, said in zip(pieces[::2], [*words, ""], strict=True)) == text:
            return [*accumulate(len(between) + len(said) for between, said in zip(pieces[::2], words, strict=False))]
    return []


def _found_ends(chat: Chat, text: str) -> list[int]:
    """Returns the character of a conversation's text at which the words of each message end, as a search from message
    to message finds them; of the model's own words that the template leaves out, where the message before ends. [] if
    another's words are not there."""
    ends, at = [], 0
    for message in chat.messages:
        words, is_own = message["content"].strip(), message["role"] in _ASSISTANT
        if is_own and words not in text[at:]:
            words = words.rpartition("</think>")[2].strip()  # templates leave out the reasoning of earlier turns
        start = text.find(words, at)
        if start < 0 and not is_own:
            return []
        at = at if start < 0 else start + len(words)
        ends.append(at)
    return ends
