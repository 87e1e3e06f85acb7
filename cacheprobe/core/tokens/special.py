"""Says which tokens of a text are special: those whose states dictionaries leave out unless include_special is set.

The state of the first token, to which much attention goes, is hundreds of times as long as others in many models. It
would decide what a dictionary learns, and the share of variance that it explains.
"""

from collections.abc import Container, Mapping
from typing import Any


def special_token_ids(model: Any) -> tuple[int, ...]:
    """Returns the ids that a model's tokenizer calls special, such as the end of a turn, sorted; () without one."""
    tokenizer = getattr(model, "tokenizer", None)
    added: Mapping[int, object] = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {token_id for token_id, token in added.items() if getattr(token, "special", False)}
    return tuple(sorted({*marked, *map(int, getattr(tokenizer, "all_special_ids", ()))}))


def is_special(position: int, token_id: int, special: Container[int]) -> bool:
    """Returns whether a token is the first of its text, or has one of the ids `special`."""
    return position == 0 or token_id in special
