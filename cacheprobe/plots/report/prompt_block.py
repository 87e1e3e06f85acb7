"""Draws a request's prompt with its answer marked, as HTML."""

from collections.abc import Mapping

from cacheprobe.core.values import JsonDict
from cacheprobe.plots.text import markup, text_of


def prompt_block(request: JsonDict, token_texts: Mapping[int, str]) -> str:
    """Returns HTML of a request's prompt, followed by its answer, which is marked. request: as in
    `StoredRun.requests`. A prompt of token ids is shown as the tokens' texts."""
    prompt = request["prompt"]
    if not isinstance(prompt, str):
        shown = "".join(text_of(token_texts, int(token_id)) for token_id in request["prompt_token_ids"])
        prompt = shown.replace("␣", " ").replace("⏎", "\n")
    return f'<div class="prompt">{markup(prompt)}<mark>{markup(request["text"])}</mark></div>'
