"""A request's prompt with its answer marked."""

from collections.abc import Mapping
from typing import Any

from cacheprobe.plots.text import markup, text_of


def prompt_block(request: Mapping[str, Any], token_texts: Mapping[int, str]) -> str:
    """Markup. request: as in `StoredRun.requests`; a prompt of token ids is shown as their texts."""
    prompt = request["prompt"]
    if not isinstance(prompt, str):
        shown = "".join(text_of(token_texts, int(token_id)) for token_id in request["prompt_token_ids"])
        prompt = shown.replace("␣", " ").replace("⏎", "\n")
    return f'<div class="prompt">{markup(prompt)}<mark>{markup(request["text"])}</mark></div>'
