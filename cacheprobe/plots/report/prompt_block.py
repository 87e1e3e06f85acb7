"""Draws a request's prompt and its generated text, which is marked, as HTML."""

from collections.abc import Mapping

from cacheprobe.core.values import JsonDict
from cacheprobe.plots.text import markup, text_of


def prompt_block(request: JsonDict, token_texts: Mapping[int, str]) -> str:
    """Returns HTML of a request's prompt, followed by its generated text, which is marked. request: as in
    `StoredRun.requests`. For a prompt of token ids, the tokens' texts are shown."""
    prompt = request["prompt"]
    if not isinstance(prompt, str):
        shown = "".join(text_of(token_texts, int(token_id)) for token_id in request["prompt_token_ids"])
        prompt = shown.replace("␣", " ").replace("⏎", "\n")
    return f'<div class="prompt">{markup(prompt)}<mark>{markup(request["text"])}</mark></div>'
