"""Finds the reasoning of models that think in text before they answer, between tags such as <think> and </think>."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from cacheprobe.core.records import Request
from cacheprobe.core.tokens import visible
from cacheprobe.trace.tables.schema import typed

if TYPE_CHECKING:
    from cacheprobe.trace.trace import Trace

_WHITE_SPACE = "".join(map(visible, " \n\r\t\u00a0"))


def reasoning_spans(trace: "Trace", begin: str = "<think>", end: str = "</think>") -> pd.DataFrame:
    """Returns a DataFrame with one line for each span of reasoning in the model's own turns, tags left out.

    The model's turns are the earlier ones of a `cp.Chat`, and the last one. The last turn begins in the prompt, with
    the tokens by which the chat template opens it, and ends at the first special token of the generated text. Tags in
    the text of a user or system are ignored.

    Columns: request_id; span (0 is the first of the request); first_position and end_position (absolute; the end is not
    part of it); num_tokens; is_closed, False if the end tag is missing. A token that holds a tag and other text is not
    in the span. If an end tag has no begin tag, its span begins at the first generated token; in an earlier turn, at
    the turn's first token.
    begin, end: tags as they are in the text, of one token or several.  Raises: ValueError for an empty tag.
    Twin: tests.twins.measures_slowly.reasoning_slowly, ==.
    """
    if not begin or not end:
        raise ValueError("begin and end must be tags of at least one character")
    lines, special = [], frozenset(trace.meta.get("special_token_ids", ()))
    for request in trace.requests:
        ids = [*(request.prompt_token_ids or ()), *trace.tokens[request.request_id]]
        texts = [trace.token_texts.get(token, "") for token in ids]
        found = spans_of(request, ids, texts, special, begin, end)
        lines += [
            (request.request_id, number, first, stop, stop - first, is_closed)
            for number, (first, stop, is_closed) in enumerate(found)
        ]
    return typed(lines, "reasoning_spans")


def with_reasoning(trace: "Trace", table: pd.DataFrame, begin: str = "<think>", end: str = "</think>") -> pd.DataFrame:
    """Returns a copy of a table of the trace with the column in_reasoning: whether the token at the line's position is
    part of a span of `reasoning_spans`.

    table: such as trace.rows(), trace.hypotheses() or trace.features(). A rejected draft token counts as the committed
    token at its position does. Raises: ValueError for a table without the columns request_id and position.
    """
    if lacking := {"request_id", "position"} - set(table.columns):
        raise ValueError(f"the table has no column {min(lacking)}; give one such as trace.rows()")
    spans, inside = reasoning_spans(trace, begin, end), np.zeros(len(table), dtype=bool)
    for request_id, own in spans.groupby("request_id"):
        lines = np.flatnonzero(table.request_id == request_id)
        positions = table.position.to_numpy()[lines]
        newest = np.searchsorted(own.first_position, positions, side="right") - 1
        inside[lines] = (newest >= 0) & (positions < own.end_position.to_numpy()[newest])
    return table.assign(in_reasoning=inside)


def spans_of(
    request: Request, token_ids: Sequence[int], texts: Sequence[str], special: Collection[int], begin: str, end: str
) -> list[tuple[int, int, bool]]:
    """Returns the spans of `reasoning_spans` of one request, as `spans_in` does.

    token_ids, texts: of the prompt and the generated tokens; texts as `visible` shows them.  special: ids of special
    tokens.
    """
    begin, end, prompt = visible(begin), visible(end), request.num_prompt_tokens
    marks = [i for i, token in enumerate(token_ids) if token in special and texts[i] not in (begin, end)]
    *earlier, (first, _) = request.turns or [(_start_of_turn(texts[:prompt], marks, begin), prompt)]
    stop = next((i for i in marks if i >= prompt), len(token_ids))
    stops: object = request.sampling.stop_token_ids if request.sampling else ()
    if prompt < stop == len(token_ids) and isinstance(stops, tuple) and token_ids[-1] in stops:
        stop -= 1
    return [
        (turn + start, turn + end_position, is_closed)
        for turn, turn_end in [*earlier, (first, stop)]
        for start, end_position, is_closed in spans_in(
            texts[turn:turn_end], prompt - turn if turn_end == stop else 0, begin, end
        )
    ]


def _start_of_turn(texts: Sequence[str], marks: Sequence[int], begin: str) -> int:
    """Returns the first token of the model's turn at the end of a prompt: after the last special token behind the
    prompt's first. Without one, the token of a begin tag that ends the prompt; else the number of tokens."""
    if inner := [i for i in marks if 0 < i < len(texts)]:
        return inner[-1] + 1
    text = "".join(texts).rstrip(_WHITE_SPACE)
    if not text.endswith(begin):
        return len(texts)
    return bisect_right(list(accumulate(map(len, texts), initial=0)), len(text) - len(begin)) - 1


def spans_in(texts: Sequence[str], num_prompt_tokens: int, begin: str, end: str) -> list[tuple[int, int, bool]]:
    """Returns (first token, token after the last, whether the end tag is there) of each span in a list of token
    texts."""
    text, starts = "".join(texts), list(accumulate(map(len, texts), initial=0))
    generated, at, spans = starts[min(num_prompt_tokens, len(texts))], 0, []

    def token_at(character: int) -> int:
        """Returns the index of the token that holds a character; tokens without text hold none."""
        return bisect_right(starts, character) - 1

    while True:
        opened, closed = text.find(begin, at), text.find(end, max(at, generated))
        if closed >= 0 and at <= generated and not 0 <= opened < closed:
            first = num_prompt_tokens
        elif opened >= 0:
            first, closed = token_at(opened + len(begin) - 1) + 1, text.find(end, opened + len(begin))
        else:
            return spans
        stop = len(texts) if closed < 0 else token_at(closed)
        spans.append((first, max(first, stop), closed >= 0))
        if closed < 0:
            return spans
        at = closed + len(end)
