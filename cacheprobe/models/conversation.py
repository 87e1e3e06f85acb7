"""Finds the turns of a conversation in its prompt, and the tokens that end a turn or a text."""

from collections.abc import Mapping, Sequence

from cacheprobe.core.live import LiveTokenizer
from cacheprobe.core.records import Request
from cacheprobe.core.tokens.special import special_token_ids
from cacheprobe.models.base import CachedLM

_ASSISTANT = ("assistant", "model")
"""Roles of the model's own turns."""
_CONTENT = "the words of a turn"


def stop_sources(model: CachedLM, is_chat: bool) -> dict[int, str]:
    """Returns where each token is named that ends a request without stop tokens of its own, as a dict by token id.

    is_chat: the prompt is a conversation, so the end of the model's turn, and of the tokenizer's texts, end it too.
    """
    sources = dict.fromkeys(model.stop_token_ids, model.stop_source)
    if is_chat:
        if (turn_end := _end_of_turn(model)) is not None:
            sources.setdefault(turn_end, "the chat template")
        if (text_end := getattr(model.tokenizer, "eos_token_id", None)) is not None:
            sources.setdefault(text_end, "the tokenizer")
    return sources


def _end_of_turn(model: CachedLM) -> int | None:
    """Returns the first special token after the model's turn in the chat template; None if there is none."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _CONTENT}]
    try:
        text = model.tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template raises errors of its own
        return None
    after = model.tokenizer(text.rpartition(_CONTENT)[2], add_special_tokens=False).input_ids
    special = special_token_ids(model)
    return next((token_id for token_id in after if token_id in special), None)


def stopped_by(model: CachedLM, request: Request, committed: Sequence[int]) -> str:
    """Returns what ended a request that finished with the reason "stop": its last token and where it is named as a stop
    token, or its stop text."""
    assert request.sampling is not None
    last, named = committed[-1], stop_sources(model, request.is_chat)
    own: object = request.sampling.stop_token_ids
    assert isinstance(own, tuple)
    if last not in own:
        return f"a text of SamplingParams.stop, {', '.join(map(repr, request.sampling.stop or ()))}"
    source = named[last] if set(own) == set(named) else "SamplingParams.stop_token_ids"
    return f"token {last} ({model.token_texts([last])[0]}) of {source}"


def assistant_turns(
    messages: Sequence[Mapping[str, str]], text: str, tokenizer: LiveTokenizer, token_ids: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Returns (first token, token after the last) of each of the model's turns in a rendered conversation; the last one
    is the turn to be generated. () if the turns are not found: the template changes another's words, or the tokenizer
    does not say where its tokens stand.

    A turn begins where the words of the turn before it end, so that what the template puts in front belongs to it.
    """
    found, at = [], 0
    for message in messages:
        words, is_own = message["content"].strip(), message["role"] in _ASSISTANT
        if is_own and words not in text[at:]:
            words = words.rpartition("</think>")[2].strip()  # templates leave out the reasoning of earlier turns
        start = text.find(words, at)
        if start < 0 and not is_own:
            return ()
        if start >= 0:
            found += [(at, start + len(words))] if is_own else []
            at = start + len(words)
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError:
        return ()
    if tuple(encoded.input_ids) != tuple(token_ids):
        return ()
    starts = [start for start, _ in encoded.offset_mapping]

    def token_at(character: int) -> int:
        """Returns the index of the first token that begins at a character or after it."""
        return next((i for i, start in enumerate(starts) if start >= character), len(starts))

    return (*((token_at(first), token_at(end)) for first, end in found), (token_at(at), len(starts)))
