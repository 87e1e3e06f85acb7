"""Changed recurrent states the slow way: transformers' own model, one token at a time over its own cache, whose states
are changed by hand between two tokens. Shares no code with cacheprobe's hooks or cache."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

Change = Callable[[Tensor], Tensor]
"""Function from a state [h, ...] to the changed one."""
Changes = Mapping[tuple[int, int], Change]
"""(layer, position) -> what changes the state after the token at this position."""


@torch.inference_mode()
def logits_slowly(live: PreTrainedModel, text: list[int], changes: Changes) -> tuple[Tensor, dict[int, list[Tensor]]]:
    """Returns the logits [t, v] of a text, and the states by layer after each of its tokens, as changed."""
    held = DynamicCache(config=live.config)
    name = "cache_params" if live.config.model_type.startswith("mamba") else "past_key_values"
    logits, states = [], {}
    for position, token in enumerate(text):
        logits.append(live(torch.tensor([[token]]), use_cache=True, **{name: held}).logits[0, -1])
        for layer, one in enumerate(held.layers):
            recurrent: Any = getattr(one, "recurrent_states", None)
            if recurrent is None or recurrent[0] is None:
                continue
            if (change := changes.get((layer, position))) is not None:
                recurrent[0] = change(recurrent[0][0].clone()).clone()[None]
            states.setdefault(layer, []).append(recurrent[0][0].clone())
    return torch.stack(logits), states


def continued_slowly(live: PreTrainedModel, prompt: list[int], count: int, changes: Changes) -> list[int]:
    """Returns the `count` likeliest tokens after a prompt, one after the other."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(logits_slowly(live, text, changes)[0][-1].argmax()))
    return text[len(prompt) :]
