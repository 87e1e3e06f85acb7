"""Names the part of a coin-flip question that each token belongs to: the coin's first state, a person's words, or the
question."""

from cacheprobe.models.base import CachedLM
from cacheprobe.tasks.base import Question


def parts_of(lm: CachedLM, question: Question) -> list[tuple[str, str]]:
    """Returns a list of (span, slot name) for each token of a question. Slot names are finer than spans: they tell
    where a person's words end, and name the question's words.

    The state changes on the token that completes a person's words. "last" is the last person.
    """
    encoded = lm.tokenizer(question.text, return_offsets_mapping=True)
    texts = lm.token_texts(encoded["input_ids"])
    return [
        _part(question, start, end, text.strip())
        for (start, end), text in zip(encoded["offset_mapping"], texts, strict=True)
    ]


def _part(question: Question, start: int, end: int, text: str) -> tuple[str, str]:
    (_, said), *events = question.spans
    if end < said:
        return ("before the word",) * 2
    if start < said <= end:
        return ("heads or tails",) * 2
    for number, (first, last) in enumerate(events, 1):
        who = "last person" if number == len(events) else "earlier person"
        if end <= first:
            return ("between",) * 2
        if end < last:
            return f"{who}'s words", f"{who}'s words, not their end"
        if start < last <= end:
            return f"{who}'s words", f"{who}'s words, their end"
    return "question", f"question: {text}"
