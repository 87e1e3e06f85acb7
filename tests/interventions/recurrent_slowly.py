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
    logits, states, held = [], {}, None
    for position, token in enumerate(text):
        out, held = fed(live, [token], held)
        logits.append(out[-1])
        for layer, parts in _parts(held).items():
            state = _joined(parts)
            if (change := changes.get((layer, position))) is not None:
                state = change(state.clone()).clone()
                widths = [part[0].numel() for part in parts]
                for part, new in zip(parts, state.flatten(1).split(widths, 1), strict=True):
                    part.copy_(new.reshape(part.shape))
            states.setdefault(layer, []).append(state.clone())
    return torch.stack(logits), states


@torch.inference_mode()
def fed(live: PreTrainedModel, token_ids: list[int], held: Any = None) -> tuple[Tensor, Any]:
    """Returns the logits [t, v] of tokens after those that transformers' own object of states has seen, and this
    object."""
    kind = live.config.model_type
    name = {"mamba": "cache_params", "mamba2": "cache_params", "xlstm": "cache_params", "rwkv": "state"}.get(kind)
    if held is None and kind not in ("rwkv", "xlstm"):
        held = DynamicCache(config=live.config)
    out = live(torch.tensor([token_ids]), use_cache=True, **{name or "past_key_values": held})
    return out.logits[0], held if held is not None else getattr(out, str(name))


def states_in(held: Any) -> dict[int, Tensor]:
    """Layer -> its recurrent state [h, ...] in transformers' own object."""
    return {layer: _joined(parts) for layer, parts in _parts(held).items()}


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1) if len(parts) > 1 else parts[0]


def _parts(held: Any) -> dict[int, list[Tensor]]:
    """Layer -> views [h, ...] of the parts of its recurrent state: one, or three in RWKV and xLSTM."""
    if isinstance(held, list):  # RWKV: numerator, denominator and maximum [b, h, layers]
        return {layer: [part[0, :, layer, None] for part in held[2:]] for layer in range(held[2].shape[-1])}
    if hasattr(held, "rnn_state"):  # xLSTM: matrix, normaliser and maximum
        return {layer: [part[0] for part in parts] for layer, parts in held.rnn_state.items()}
    recurrent = {layer: getattr(one, "recurrent_states", None) for layer, one in enumerate(held.layers)}
    return {layer: [parts[0][0]] for layer, parts in recurrent.items() if parts and parts[0] is not None}


def continued_slowly(live: PreTrainedModel, prompt: list[int], count: int, changes: Changes) -> list[int]:
    """Returns the `count` likeliest tokens after a prompt, one after the other."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(logits_slowly(live, text, changes)[0][-1].argmax()))
    return text[len(prompt) :]
